"""Prompts whose groups were not decided: kept for later batches of the same caller, and saved for the next server."""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Literal

import msgspec

from darts_server.engine.port import OutputT, PromptRenderer
from darts_server.exceptions import StateDamaged, StateError
from darts_server.rollout.candidates import CarriedCandidate, SavedEnd, copy_to_arrays
from darts_server.store import Store
from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

WRITE_BYTES = 1 << 23
"""Size of one write to the store, which takes about a tenth of a second."""
PORTABLE_SECONDS = 2.0
"""Time at shutdown to take outputs from the engine. A supervisor kills a server that is slow to end."""
SAVE_SECONDS = 4.0
"""Time at shutdown to write all prompts."""
MALFORMED = (ValueError, OverflowError, RecursionError)
"""Errors of documents that are not ours. Errors of msgspec are ``ValueError``."""
CANDIDATE_BYTES = 500
"""Memory of a carried candidate without its tokens."""
Identity = tuple[str, str]
"""A prompt's key, and a hash of what the model sees: a caller may use one key for several prompts."""


class Carry(StrEnum):
    """Treatment of prompts that are undecided at the end of a batch."""

    DROP = "drop"
    RESTART = "restart"
    """Prompts are kept, and start first in a later batch."""
    RESUME = "resume"
    """Prompts are kept, and their candidates continue from their tokens."""


MAX_CARRIED_TOKENS = 1 << 22
"""A thousand prompts with 4,096 tokens each, in 50 MB."""


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """Limits of the prompts that are carried over for one caller.

    Beyond ``prompts`` or ``prompt_bytes``, the oldest prompts are dropped. Beyond the number of generated ``tokens``,
    the oldest prompts start again. So does a prompt whose first token is more than ``staleness`` weight versions old.
    """

    prompts: int = 4096
    prompt_bytes: int = 1 << 29
    tokens: int = MAX_CARRIED_TOKENS
    staleness: int = 1


@dataclass(frozen=True, slots=True)
class CarriedGroup(Generic[OutputT]):
    """The candidates of an undecided group, with their tokens.

    ``terms``: see `describe_terms`. Only a batch with equal terms can resume the group.
    ``tail_seed``: selects the same candidates as if the group had not been stopped.
    """

    terms: str
    saturated: bool
    tail_seed: Sequence[int]
    candidates: Sequence[CarriedCandidate[OutputT]]

    @property
    def tokens(self) -> int:
        return sum(candidate.tokens for candidate in self.candidates)

    def staleness(self, version: int) -> int:
        """Return the largest difference of the tokens' weight versions from ``version``."""
        spans = [span for candidate in self.candidates for span in candidate.version_spans]
        return max((abs(version - generated_by) for generated_by, _ in spans), default=0)


@dataclass(frozen=True, slots=True)
class CarriedPrompt:
    """A prompt whose group was not decided. Without a ``group`` it starts again."""

    prompt: PromptSpec
    identity: Identity
    group: CarriedGroup[Any] | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.group is None else self.group.tokens

    @property
    def size_bytes(self) -> int:
        """Approximate memory without generated tokens, which have a limit of their own."""
        size = self.prompt.size_bytes
        if self.group is not None:
            size += len(self.group.terms) + CANDIDATE_BYTES * len(self.group.candidates)
        return size


Owned = tuple[str | None, CarriedPrompt]


class CarriedPrompts:
    """Keep prompts in memory by the name of their caller, the oldest first.

    ``may_call``: returns whether a caller of that name can still send requests. Prompts of other callers are dropped,
    as no other caller can take them.
    """

    def __init__(
        self, limits: CarryLimits | None = None, may_call: Callable[[str | None], bool] = lambda _: True
    ) -> None:
        self.limits = limits or CarryLimits()
        self._may_call = may_call
        self._kept: dict[str | None, list[CarriedPrompt]] = {}
        # Generated tokens, counted once: metrics read the sum, and there may be thousands of prompts.
        self._tokens: dict[str | None, int] = {}

    def __iter__(self) -> Iterator[Owned]:
        for owner, kept in self._kept.items():
            for prompt in kept:
                yield owner, prompt

    @property
    def prompts(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def tokens(self) -> int:
        return sum(self._tokens.values())

    def count(self, owner: str | None) -> int:
        return len(self._kept.get(owner, ()))

    def take(
        self, owner: str | None, named: Sequence[Identity], *, others: bool
    ) -> list[tuple[int | None, CarriedPrompt]]:
        """Remove and return a caller's prompts, the oldest first, each with its index in ``named`` or None.

        A prompt is taken as often as it is named. ``others``: take prompts that are not named too.
        """
        places: dict[Identity, list[int]] = {}
        for place in reversed(range(len(named))):
            places.setdefault(named[place], []).append(place)
        taken: list[tuple[int | None, CarriedPrompt]] = []
        left: list[CarriedPrompt] = []
        for prompt in self._kept.pop(owner, ()):
            free_places = places.get(prompt.identity)
            if free_places:
                taken.append((free_places.pop(), prompt))
            elif others:
                taken.append((None, prompt))
            else:
                left.append(prompt)
        self._set_prompts(owner, left)
        return taken

    def put(self, owner: str | None, new: Iterable[CarriedPrompt], older: Iterable[CarriedPrompt] = ()) -> None:
        """Keep prompts within the limits. ``older``: prompts that go before the kept prompts."""
        prompts = [*older, *self._kept.pop(owner, ()), *new]
        kept: list[CarriedPrompt] = []
        size = 0
        tokens = 0
        for prompt in reversed(prompts):
            size += prompt.size_bytes
            tokens += prompt.tokens
            if len(kept) == self.limits.prompts or size > self.limits.prompt_bytes:
                break
            if tokens > self.limits.tokens:
                prompt = replace(prompt, group=None)
            kept.append(prompt)
        self._set_prompts(owner, kept[::-1])
        excess = len(prompts) - len(kept)
        if excess:
            logger.warning(
                "%d prompts that were carried over are dropped: at most %d are kept for a caller (--carried-prompts), "
                "with at most %d bytes (half of --kept-bytes)",
                excess,
                self.limits.prompts,
                self.limits.prompt_bytes,
            )
        # A batch may end after its caller's key was removed.
        self.drop_without_caller()

    def _set_prompts(self, owner: str | None, prompts: list[CarriedPrompt]) -> None:
        self._kept.pop(owner, None)
        self._tokens.pop(owner, None)
        if prompts:
            self._kept[owner] = prompts
            self._tokens[owner] = sum(prompt.tokens for prompt in prompts)

    def drop_without_caller(self) -> None:
        gone = [owner for owner in self._kept if not self._may_call(owner)]
        prompts = sum(map(self.count, gone))
        for owner in gone:
            self._set_prompts(owner, [])
        if prompts:
            logger.warning(
                "%d prompts that were carried over are dropped: their API key is not valid any more", prompts
            )


class _SavedPrompt(msgspec.Struct, array_like=True):
    """A prompt on the disk as MessagePack. ``group`` is decoded separately, so that an error in it loses tokens alone.

    ``format``: 3 with `PromptSpec.chat_options`, which older versions would ignore silently.
    """

    format: Literal[2, 3]
    model: str
    owner: str | None
    prompt: PromptSpec
    identity: Identity
    group: msgspec.Raw


_DECODER = msgspec.msgpack.Decoder(_SavedPrompt)
_GROUP_DECODER = msgspec.msgpack.Decoder(CarriedGroup[Any] | None)
# The hook raises for everything but arrays.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=array.tolist)


class SavedPrompts:
    """Prompts on the disk. ``model``: fingerprint of the served model. Tokens of other models are not used."""

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._model = model

    def save(self, prompts: Iterable[Owned], seconds: float = math.inf) -> int:
        """Save portable prompts in order until ``seconds`` have passed; return how many are on the disk."""
        ends_at = time.monotonic() + seconds
        saved = 0
        size = 0
        documents: list[bytes] = []
        try:
            for owner, prompt in prompts:
                if time.monotonic() >= ends_at:
                    break
                number = 2 if prompt.prompt.chat_options is None else 3
                fields = (number, self._model, owner, prompt.prompt, prompt.identity, prompt.group)
                documents.append(_ENCODER.encode(fields))
                size += len(documents[-1])
                if size >= WRITE_BYTES:
                    self._store.add_carried(documents)
                    saved += len(documents)
                    documents = []
                    size = 0
            self._store.add_carried(documents)
            saved += len(documents)
        except StateError as error:
            logger.error("prompts that were carried over cannot be saved: %s", error)
        return saved

    async def save_in_time(
        self, prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any], *, with_tokens: bool
    ) -> int:
        """Save prompts at shutdown while there is time; log and return the number of lost prompts.

        A prompt starts again if its tokens cannot be saved in time.
        """
        ready: list[Owned] = []
        restarted: list[Exception] = []
        ends_at = asyncio.get_running_loop().time() + PORTABLE_SECONDS
        for owner, prompt in prompts:
            group = None
            if with_tokens and prompt.group is not None:
                try:
                    async with asyncio.timeout_at(ends_at):
                        # Most groups take no turn of the event loop, so that the timeout would never be seen.
                        await asyncio.sleep(0)
                        group = await make_portable(prompt.group, renderer)
                except Exception as error:
                    # One output that cannot be read must not lose all prompts.
                    restarted.append(error)
            ready.append((owner, replace(prompt, group=group)))
        saved = await asyncio.to_thread(self.save, ready, SAVE_SECONDS)
        lost = len(prompts) - saved
        _log_errors(restarted, "start again: their tokens could not be saved in time")
        if lost:
            logger.error("%d prompts that were carried over are lost: they could not be saved, or not in time", lost)
        return lost

    def take(self, version: int) -> list[Owned]:
        """Remove and return the saved prompts, so that they are not used twice if this server is killed.

        ``version``: weight version with which this server starts. Each server counts versions from its start, so tokens
        of any other version are of unknown weights, and their prompts start again.
        """
        taken: list[Owned] = []
        lost: list[Exception] = []
        restarted: list[Exception] = []
        try:
            documents = self._store.take_carried()
        except StateError as error:
            logger.error("prompts that were carried over are not used, as they cannot be read or removed: %s", error)
            return []
        for document in documents:
            try:
                if isinstance(document, StateDamaged):
                    raise document
                fields = _DECODER.decode(document)
                prompt = fields.prompt
                if [prompt.token_ids, prompt.messages, prompt.text].count(None) != 2:
                    raise ValueError("it has no prompt")
            except (StateDamaged, *MALFORMED) as error:
                lost.append(error)
                continue
            group = None
            if fields.model == self._model:
                try:
                    group = _GROUP_DECODER.decode(fields.group)
                    if group is not None:
                        group = _check_group(group)
                except MALFORMED as error:
                    group = None
                    restarted.append(error)
            if group is not None and group.staleness(version) > 0:
                group = None
            taken.append((fields.owner, CarriedPrompt(prompt, fields.identity, group)))
        _log_errors(lost, "are lost: this version cannot read them")
        _log_errors(restarted, "start again")
        return taken


def _log_errors(errors: Sequence[Exception], end: str) -> None:
    if errors:
        logger.error("%d prompts that were carried over %s (the first: %r)", len(errors), end, errors[0])


async def make_portable(group: CarriedGroup[Any], renderer: PromptRenderer[Any, Any]) -> CarriedGroup[Any]:
    """Return a group without outputs of the engine: finished candidates have their text instead."""
    candidates = list(group.candidates)
    for place, candidate in enumerate(candidates):
        result = candidate.result
        if result is not None and result.finish_reason is not None:
            sample = await renderer.to_sample(result.output)
            saved_end = SavedEnd(result.finish_reason, sample.text)
            candidates[place] = replace(candidate, result=None, saved_end=saved_end)
    return replace(group, candidates=candidates)


def _check_group(group: CarriedGroup[Any]) -> CarriedGroup[Any]:
    """Return a decoded group with its tokens in arrays, or raise one of `MALFORMED`."""
    candidates = []
    has_logprobs = set()
    for candidate in group.candidates:
        prefix = candidate.prefix
        versions = [version for version, _ in candidate.version_spans]
        counts = [tokens for _, tokens in candidate.version_spans]
        lengths = {candidate.tokens, sum(counts)}
        if prefix.logprobs is not None:
            lengths.add(len(prefix.logprobs))
        is_valid = min([*prefix.token_ids, *versions], default=0) >= 0 and min(counts, default=1) >= 1
        if candidate.result is not None or len(lengths) > 1 or not is_valid:
            raise ValueError("a candidate has other numbers of log-probs or versions than of tokens")
        if candidate.tokens:
            has_logprobs.add(prefix.logprobs is not None)
        candidates.append(replace(candidate, prefix=copy_to_arrays(prefix)))
    if len(has_logprobs) > 1:
        raise ValueError("some candidates have log-probs, and others have none")
    if min(group.tail_seed, default=0) < 0:
        raise ValueError("its seed is negative")
    return replace(group, candidates=candidates)
