"""Limit what checking a schema, grammar or regular expression of a request may cost, and check each once.

vLLM checks them in this process, for each prompt and candidate again, by libraries without limits of their own: 30,000
nested parentheses end the process by a stack overflow in xgrammar, whose time grows with the cube of a schema's depth.
Here what is too large or too deep is refused before a library sees it, and the others' verdicts are kept.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from copy import copy
from dataclasses import fields
from functools import partial, wraps
from hashlib import sha256
from math import exp
from threading import Thread
from typing import Any

import msgspec
import xgrammar  # noqa: F401  # vLLM would import it during the first check
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import backend_guidance, backend_outlines, backend_xgrammar

from darts_server.caller import caller
from darts_server.exceptions import RETRY_SECONDS, InvalidRequest, Overloaded
from darts_server.serving.kept import Kept

FIELD = "structured_outputs"
MAX_SAMPLING_BYTES = 64 * 1024
"""Of sampling parameters, as the engine gets them with each candidate: it may have 65,000 of them."""
MAX_DEPTH = 64
"""Objects and arrays in each other, in a schema. The most of such schemas that fit take xgrammar half a second."""
MAX_BRACKETS = 256
"""Brackets in each other, in a pattern, regular expression or grammar. xgrammar's stack has room for some 20,000."""
CHECK_SECONDS = 0.5
"""For which the event loop waits for a check: usual ones take a few milliseconds, and the worst that fit a minute."""
WAITED_SECONDS, WINDOW_SECONDS = 1.0, 5.0
"""For how many of the last seconds the event loop waits for all checks together. A lone caller may use half of
that: one check that takes long, or a hundred usual ones."""
MAX_PENDING = 32
"""Checks of one caller that run or wait, each with its own thread. What is sent again finds its verdict."""
NEGLIGIBLE_SECONDS = 1e-4  # of waiting, after which a caller is forgotten
KEPT_VERDICTS = 256  # of all callers together. All requests of a training run have one schema or a few
BRACKET = re.compile(r"[(\[{)\]}]")

Converted = tuple[list[str] | None, str | None]
"""``choice`` and ``grammar``: a check may replace the first by the second."""

_verdicts: Kept[tuple[str, bytes], Future[Converted]] = Kept(KEPT_VERDICTS)
"""By the name of the check and a digest of what was checked, of each caller."""


class Waits:
    """How long the event loop has waited for the checks of each caller. The past counts less with time.

    ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited: dict[str, float] = {}
        self._at = clock()

    def left(self, who: str) -> float:
        """Return for how many seconds the event loop may wait for a check of this caller.

        A caller may use half of what the others leave, so that something is left for the next caller.
        """
        now = self._clock()
        remaining = exp((self._at - now) / WINDOW_SECONDS)
        self._at = now
        waited = {name: seconds * remaining for name, seconds in self._waited.items()}
        self._waited = {name: seconds for name, seconds in waited.items() if seconds > NEGLIGIBLE_SECONDS}
        own = self._waited.get(who, 0.0)
        others = sum(self._waited.values()) - own
        return max(0.0, min(CHECK_SECONDS, (WAITED_SECONDS - others) / 2 - own))

    def add(self, who: str, seconds: float) -> None:
        self._waited[who] = self._waited.get(who, 0.0) + seconds


_waits = Waits()


def limit_checks() -> None:
    """Limit the checks of vLLM's backends, which it imports again for each request. Harmless if they are already."""
    for module, name in (
        (backend_xgrammar, "validate_xgrammar_grammar"),
        (backend_guidance, "validate_guidance_grammar"),
        (backend_outlines, "validate_structured_output_request_outlines"),
    ):
        if not hasattr(validate := getattr(module, name), "__wrapped__"):
            setattr(module, name, _limited(validate))


def _limited(validate: Callable[..., None]) -> Callable[..., None]:
    @wraps(validate)
    def check(params: SamplingParams, *args: Any, **more: Any) -> None:
        """Check as vLLM does, or give the verdict of an earlier time.

        In a thread, where the libraries let the event loop go on. A check that takes too long can be waited for, but
        not ended, and some never end. The next checks of its caller begin when it is over, other callers' at once.
        """
        if (outputs := params.structured_outputs) is None:
            return
        if outputs._backend == "auto" and validate.__module__ == backend_outlines.__name__:
            # vLLM's last choice. Its memory doubles with each nested array, and its time is cubic in the properties.
            raise VLLMValidationError("neither xgrammar nor guidance supports this schema; simplify it")
        content = {field.name: getattr(outputs, field.name) for field in fields(outputs) if field.init}
        try:
            encoded = msgspec.msgpack.encode(content)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(FIELD, f"cannot be sent to the engine: {error}") from error
        key, who = (validate.__name__, sha256(encoded).digest()), caller.get().name or ""
        verdict = _verdicts.of(who).get(key)
        if verdict is None:
            if len(encoded) > MAX_SAMPLING_BYTES:
                raise too_large(FIELD, len(encoded))
            check_depth(content)
        pending = [each for each in list(_verdicts.of(who).values()) if not each.done()]
        if verdict is None and len(pending) < MAX_PENDING:
            verdict, trial = Future(), copy(params)
            trial.structured_outputs = copy(outputs)
            previous = pending[-1] if pending else None
            checking = (verdict, partial(validate, trial, *args, **more), trial, previous)
            Thread(target=_run, args=checking, daemon=True).start()
            _verdicts.put(who, key, verdict)
        if verdict is None or (pending and not verdict.done()):
            raise Overloaded("a schema or grammar of yours is still being checked; send this one again", RETRY_SECONDS)
        _verdicts.put(who, key, verdict)
        left = _waits.left(who)
        began = time.monotonic()
        try:
            failure = verdict.exception(left)
        except TimeoutError:
            what = f"this schema or grammar takes more than {CHECK_SECONDS:g} seconds to check; simplify it"
            if left < CHECK_SECONDS:
                what = "too many different schemas and grammars were sent in the last seconds; use fewer"
            raise Overloaded(f"{what}, or send it again when it has been checked", RETRY_SECONDS) from None
        finally:
            _waits.add(who, time.monotonic() - began)
        if failure is not None:
            raise failure.with_traceback(None)  # or it would keep all requests that it refuses
        outputs.choice, outputs.grammar = verdict.result()

    return check


def _run(
    verdict: Future[Converted],
    validate: Callable[[], None],
    trial: SamplingParams,
    previous: Future[Converted] | None,
) -> None:
    """``previous``: of the same caller, which is checked first."""
    assert trial.structured_outputs is not None
    if previous is not None:
        wait([previous])
    try:
        validate()
        verdict.set_result((trial.structured_outputs.choice, trial.structured_outputs.grammar))
    except Exception as error:
        error.__cause__ = error.__context__ = None  # their frames would keep the whole request
        verdict.set_exception(error)
    except BaseException as error:  # a panic of a library in Rust; without a verdict its caller could check no more
        verdict.set_exception(VLLMValidationError(f"it cannot be checked: {error!r}"))


def too_large(field: str, size: int) -> InvalidRequest:
    """Return the error for sampling parameters of so many bytes, of which ``field`` has the most."""
    return InvalidRequest(
        field,
        f"must have at most {MAX_SAMPLING_BYTES} bytes together with all other sampling parameters, since the engine "
        f"keeps them for each candidate; got {size}",
    )


def check_depth(content: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` if a field of structured outputs has too much in each other."""

    def check_part(value: object, depth: int) -> None:
        if isinstance(value, str):
            nested = 0
            for bracket in BRACKET.findall(value):
                nested = nested + 1 if bracket in "([{" else max(0, nested - 1)
                if nested > MAX_BRACKETS:
                    raise too_deep(f"{MAX_BRACKETS} brackets")
        elif isinstance(value, Mapping | list | tuple):
            if depth == MAX_DEPTH:
                raise too_deep(f"{MAX_DEPTH} objects and arrays")
            # Also the names of a mapping, some of which are patterns.
            for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
                check_part(part, depth + 1)

    def too_deep(most: str) -> InvalidRequest:
        return InvalidRequest(f"{FIELD}.{name}", f"must have at most {most} in each other; flatten it")

    for name, value in content.items():
        if name in ("json", "structural_tag") and isinstance(value, str):
            try:
                value = json.loads(value)
            except RecursionError:
                raise too_deep(f"{MAX_DEPTH} objects and arrays") from None
            except ValueError:
                pass  # vLLM says what is wrong with it
        check_part(value, 0)
