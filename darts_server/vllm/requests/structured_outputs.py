"""Limit what checking a schema, grammar or regular expression may cost, and check each only once.

vLLM checks them in this process, again for each prompt and candidate, by libraries without limits: 30,000 nested
parentheses end the process by a stack overflow in xgrammar, whose time grows with the cube of a schema's depth.
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

# vLLM would import it during the first check.
import xgrammar  # noqa: F401
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import backend_guidance, backend_outlines, backend_xgrammar

from darts_server.caller import caller
from darts_server.exceptions import RETRY_SECONDS, InvalidRequest, Overloaded
from darts_server.serving.fair_cache import FairCache

FIELD = "structured_outputs"
# The engine gets the sampling parameters with each candidate, and may have 65,000 candidates.
MAX_SAMPLING_BYTES = 64 * 1024
# Nested objects and arrays of a schema. xgrammar takes half a second for the worst schema within both limits.
MAX_DEPTH = 64
# Nested brackets of a pattern, regular expression or grammar. xgrammar's stack suffices for some 20,000.
MAX_BRACKETS = 256
# Seconds that the event loop waits for a check. Usual checks take a few milliseconds, the worst within limits a minute.
CHECK_SECONDS = 0.5
# Seconds of each window that the event loop waits for all checks. A lone caller may use half of them.
WAITED_SECONDS = 1.0
WINDOW_SECONDS = 5.0
MAX_PENDING = 32
"""Number of checks of one caller that run or wait, each in its own thread."""
# A caller whose checks took less time in total is forgotten.
NEGLIGIBLE_SECONDS = 1e-4
# All requests of a training run have one schema or a few.
MAX_CACHED = 256
BRACKET = re.compile(r"[(\[{)\]}]")

Converted = tuple[list[str] | None, str | None]
"""``choice`` and ``grammar`` after a check, which may convert the choice to a grammar."""

_checks: FairCache[tuple[str, bytes], Future[Converted]] = FairCache(MAX_CACHED)


class WaitBudget:
    """Seconds that the event loop has waited for each caller's checks. Past seconds count less with time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited: dict[str, float] = {}
        self._updated_at = clock()

    def remaining_seconds(self, caller_name: str) -> float:
        now = self._clock()
        decay = exp((self._updated_at - now) / WINDOW_SECONDS)
        self._updated_at = now
        decayed = {name: seconds * decay for name, seconds in self._waited.items()}
        self._waited = {name: seconds for name, seconds in decayed.items() if seconds > NEGLIGIBLE_SECONDS}
        waited_for_caller = self._waited.get(caller_name, 0.0)
        waited_for_others = sum(self._waited.values()) - waited_for_caller
        # A caller may use half of the time that others have not used, so that the next caller gets time too.
        share = (WAITED_SECONDS - waited_for_others) / 2
        return max(0.0, min(CHECK_SECONDS, share - waited_for_caller))

    def add(self, caller_name: str, seconds: float) -> None:
        self._waited[caller_name] = self._waited.get(caller_name, 0.0) + seconds


_wait_budget = WaitBudget()


def limit_checks() -> None:
    # vLLM imports these functions again for each request.
    for module, name in (
        (backend_xgrammar, "validate_xgrammar_grammar"),
        (backend_guidance, "validate_guidance_grammar"),
        (backend_outlines, "validate_structured_output_request_outlines"),
    ):
        validate = getattr(module, name)
        # Several engines may be started in one process.
        if not hasattr(validate, "__wrapped__"):
            setattr(module, name, _limit_check(validate))


def _limit_check(validate: Callable[..., None]) -> Callable[..., None]:
    @wraps(validate)
    def check(params: SamplingParams, *args: Any, **options: Any) -> None:
        outputs = params.structured_outputs
        if outputs is None:
            return
        if outputs._backend == "auto" and validate.__module__ == backend_outlines.__name__:
            # outlines is vLLM's last choice. Its memory doubles with each nested array, and its time is cubic in the
            # number of properties.
            raise VLLMValidationError("neither xgrammar nor guidance supports this schema; simplify it")
        content = {field.name: getattr(outputs, field.name) for field in fields(outputs) if field.init}
        try:
            encoded = msgspec.msgpack.encode(content)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(FIELD, f"cannot be sent to the engine: {error}") from error

        key = (validate.__name__, sha256(encoded).digest())
        caller_name = caller.get().name or ""
        outcome = _checks.entries_of(caller_name).get(key)
        if outcome is None:
            if len(encoded) > MAX_SAMPLING_BYTES:
                raise too_large(FIELD, len(encoded))
            check_depth(content)

        # Start a check that is not cached in a thread, where the libraries release the GIL. It cannot be ended, and may
        # run forever. The caller's next checks begin after it, and other callers' checks at once.
        pending = [future for future in list(_checks.entries_of(caller_name).values()) if not future.done()]
        if outcome is None and len(pending) < MAX_PENDING:
            outcome = Future()
            checked_params = copy(params)
            checked_params.structured_outputs = copy(outputs)
            previous = pending[-1] if pending else None
            arguments = (outcome, partial(validate, checked_params, *args, **options), checked_params, previous)
            Thread(
                target=_run_check,
                args=arguments,
                daemon=True,
            ).start()
            _checks.put(caller_name, key, outcome)
        if outcome is None or (pending and not outcome.done()):
            raise Overloaded("a schema or grammar of yours is still being checked; send this one again", RETRY_SECONDS)
        # Now it is the newest in the cache.
        _checks.put(caller_name, key, outcome)

        # Wait for the check, as long as the caller may block the event loop.
        allowed_seconds = _wait_budget.remaining_seconds(caller_name)
        began = time.monotonic()
        try:
            failure = outcome.exception(allowed_seconds)
        except TimeoutError:
            # The check goes on, and its result is cached for the caller's next attempt.
            problem = f"this schema or grammar takes more than {CHECK_SECONDS:g} seconds to check; simplify it"
            if allowed_seconds < CHECK_SECONDS:
                problem = "too many different schemas and grammars were sent in the last seconds; use fewer"
            raise Overloaded(f"{problem}, or send it again when it has been checked", RETRY_SECONDS) from None
        finally:
            _wait_budget.add(caller_name, time.monotonic() - began)
        if failure is not None:
            # The cached exception must not refer to all requests that it refuses.
            raise failure.with_traceback(None)
        # vLLM's check of xgrammar converts a choice to a grammar.
        outputs.choice, outputs.grammar = outcome.result()

    return check


def _run_check(
    outcome: Future[Converted],
    validate: Callable[[], None],
    checked_params: SamplingParams,
    previous: Future[Converted] | None,
) -> None:
    """Run a check after the ``previous`` check of the same caller, and set its ``outcome``.

    ``checked_params``: sampling parameters that ``validate`` checks and may convert.
    """
    outputs = checked_params.structured_outputs
    assert outputs is not None
    if previous is not None:
        wait([previous])
    try:
        validate()
        outcome.set_result((outputs.choice, outputs.grammar))
    except Exception as error:
        # The error is cached, and the frames of its causes refer to the whole request.
        error.__cause__ = None
        error.__context__ = None
        outcome.set_exception(error)
    except BaseException as error:
        # A Rust library panicked. Without an outcome, the caller's next checks would wait forever.
        outcome.set_exception(VLLMValidationError(f"it cannot be checked: {error!r}"))


def too_large(field: str, size: int) -> InvalidRequest:
    """``field``: the largest parameter. ``size``: bytes of all parameters."""
    return InvalidRequest(
        field,
        f"must have at most {MAX_SAMPLING_BYTES} bytes together with all other sampling parameters, since the engine "
        f"keeps them for each candidate; got {size}",
    )


def check_depth(content: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for content that is nested too deeply for vLLM's libraries."""

    def check_part(value: object, depth: int) -> None:
        if isinstance(value, str):
            nested = 0
            for bracket in BRACKET.findall(value):
                if bracket in "([{":
                    nested += 1
                else:
                    nested = max(0, nested - 1)
                if nested > MAX_BRACKETS:
                    raise too_deep(f"{MAX_BRACKETS} brackets")
            return

        parts: list[object] = []
        if isinstance(value, Mapping):
            # Names too, because some names are patterns.
            parts = [*value, *value.values()]
        elif isinstance(value, list | tuple):
            parts = list(value)
        else:
            return
        if depth == MAX_DEPTH:
            raise too_deep(f"{MAX_DEPTH} objects and arrays")
        for part in parts:
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
                # Not JSON: vLLM refuses it.
                pass
        check_part(value, 0)
