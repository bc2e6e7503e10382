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
from darts_server.rollout.candidates import CarriedCandidate, SavedEnd, compact
from darts_server.store import Store
from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

WRITE_BYTES = 1 << 23
"""Of documents that are written at once: about a tenth of a second."""
PORTABLE_SECONDS, SAVE_SECONDS = 2.0, 4.0
"""For all prompts at shutdown, before a supervisor ends it: to take outputs from the engine, and to write."""
MALFORMED = (ValueError, OverflowError, RecursionError)
"""Raised by documents that have other fields than ours. Errors of msgspec are the first."""
CANDIDATE_BYTES = 500
"""Memory of a candidate that goes on, without its tokens."""
Identity = tuple[str, str]
"""A prompt's key, and the key of what the model sees: callers may use one key for several prompts."""


class Carry(StrEnum):
    """What happens to prompts whose groups were not decided when enough others were."""

    DROP = "drop"
    RESTART = "restart"
    """They are kept, and start first in a later batch."""
    RESUME = "resume"
    """So is what their candidates have generated, and these go on from there."""


MAX_CARRIED_TOKENS = 1 << 22
"""A thousand prompts with 4,096 tokens each, in 50 MB. `CarryLimits.prompts` limits those that have no tokens."""


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """What the server carries over for one caller.

    ``prompts``: maximum number of prompts. ``prompt_bytes``: maximum memory of the prompts and their candidates. Beyond
    one of the two, the oldest prompts are dropped. ``tokens``: maximum number of generated tokens; beyond it the oldest
    prompts start again. ``staleness``: maximum number of weight versions since the first of a prompt's tokens; beyond
    it the prompt starts again.
    """

    prompts: int = 4096
    prompt_bytes: int = 1 << 29
    tokens: int = MAX_CARRIED_TOKENS
    staleness: int = 1


@dataclass(frozen=True, slots=True)
class CarriedGroup(Generic[OutputT]):
    """What the candidates of an undecided group have generated.

    ``terms``: of its batch; only one with the same can go on with it, also on another server. ``saturated``: see
    `Allocation`. ``tail_seed``: with the same numbers the same candidates are selected as if the group had not been
    stopped.
    """

    terms: str
    saturated: bool
    tail_seed: Sequence[int]
    candidates: Sequence[CarriedCandidate[OutputT]]

    @property
    def tokens(self) -> int:
        return sum(candidate.tokens for candidate in self.candidates)

    def staleness(self, version: int) -> int:
        """Return how far its versions are from this one."""
        versions = (each for candidate in self.candidates for each, _ in candidate.version_spans)
        return max((abs(version - each) for each in versions), default=0)


@dataclass(frozen=True, slots=True)
class CarriedPrompt:
    """A prompt whose group was not decided. ``group``: ``None`` to start again."""

    prompt: PromptSpec
    identity: Identity
    group: CarriedGroup[Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, roughly, without tokens that were generated, which have a limit of their own."""
        group = self.group
        of_group = 0 if group is None else len(group.terms) + CANDIDATE_BYTES * len(group.candidates)
        return self.prompt.size_bytes + of_group


Owned = tuple[str | None, CarriedPrompt]
"""A prompt, and the name of the caller that it is kept for."""


class CarriedPrompts:
    """Keep prompts by the name of their caller, in the order in which they came, in memory.

    Args:
        limits: of each caller.
        may_call: whether a caller of that name can still send requests. Nobody else can take its prompts, so those of
            one that cannot are dropped.
    """

    def __init__(
        self, limits: CarryLimits | None = None, may_call: Callable[[str | None], bool] = lambda _: True
    ) -> None:
        self.limits = limits or CarryLimits()
        self._may_call = may_call
        self._kept: dict[str | None, list[CarriedPrompt]] = {}
        self._tokens: dict[str | None, int] = {}  # that were generated for them

    def __iter__(self) -> Iterator[Owned]:
        """Iterate over all prompts with the names of their callers, of each the oldest first."""
        return ((owner, prompt) for owner, kept in self._kept.items() for prompt in kept)

    @property
    def prompts(self) -> int:
        """Number of prompts of all callers."""
        return sum(map(len, self._kept.values()))

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated for them."""
        return sum(self._tokens.values())

    def count(self, owner: str | None) -> int:
        """Return how many prompts of a caller are kept."""
        return len(self._kept.get(owner, ()))

    def take(
        self, owner: str | None, named: Sequence[Identity], *, others: bool
    ) -> list[tuple[int | None, CarriedPrompt]]:
        """Remove and return the caller's prompts that are named, each as often as it is; with ``others`` all.

        The oldest come first, each with its place in ``named``, ``None`` if it is not named.
        """
        places: dict[Identity, list[int]] = {}
        for place in reversed(range(len(named))):
            places.setdefault(named[place], []).append(place)
        taken: list[tuple[int | None, CarriedPrompt]] = []
        left: list[CarriedPrompt] = []
        for prompt in self._kept.pop(owner, ()):
            waiting = places.get(prompt.identity)
            if waiting or others:
                taken.append((waiting.pop() if waiting else None, prompt))
            else:
                left.append(prompt)
        self._keep(owner, left)
        return taken

    def put(self, owner: str | None, new: Iterable[CarriedPrompt], older: Iterable[CarriedPrompt] = ()) -> None:
        """Keep prompts of a caller, and drop its oldest ones, or what was generated for them, if it is too much.

        ``older``: prompts that were taken before; they are the oldest.
        """
        prompts = [*older, *self._kept.pop(owner, ()), *new]
        kept: list[CarriedPrompt] = []
        size = tokens = 0
        for prompt in reversed(prompts):
            size += prompt.size_bytes
            if len(kept) == self.limits.prompts or size > self.limits.prompt_bytes:
                break
            if prompt.group is not None and (tokens := tokens + prompt.group.tokens) > self.limits.tokens:
                prompt = replace(prompt, group=None)
            kept.append(prompt)
        self._keep(owner, kept[::-1])
        if excess := len(prompts) - len(kept):
            logger.warning(
                "%d prompts that were carried over are dropped: of a caller at most %d are kept (--carried-prompts), "
                "and at most %d bytes of them (half of --kept-bytes)",
                *(excess, self.limits.prompts, self.limits.prompt_bytes),
            )
        self.drop_without_caller()  # a batch may end after its caller's key was removed

    def _keep(self, owner: str | None, prompts: list[CarriedPrompt]) -> None:
        """Keep these prompts of a caller and no others."""
        self._kept.pop(owner, None)
        self._tokens.pop(owner, None)
        if prompts:
            self._kept[owner] = prompts
            self._tokens[owner] = sum(prompt.group.tokens for prompt in prompts if prompt.group is not None)

    def drop_without_caller(self) -> None:
        """Drop the prompts of callers that cannot send requests any more."""
        gone = [owner for owner in self._kept if not self._may_call(owner)]
        prompts = sum(len(self._kept[owner]) for owner in gone)
        for owner in gone:
            self._keep(owner, [])
        if prompts:
            logger.warning(
                "%d prompts that were carried over are dropped: their API key is not valid any more", prompts
            )


class _SavedPrompt(msgspec.Struct, array_like=True):
    """A document on the disk: MessagePack, in which dataclasses are maps. ``group``: decoded by itself.

    ``format``: 3 if the prompt has `PromptSpec.chat_options`, which earlier versions would leave out without a word.
    """

    format: Literal[2, 3]
    model: str
    owner: str | None
    prompt: PromptSpec
    identity: Identity
    group: msgspec.Raw


_DECODER, _GROUP_DECODER = msgspec.msgpack.Decoder(_SavedPrompt), msgspec.msgpack.Decoder(CarriedGroup[Any] | None)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=array.tolist)  # raises for all but arrays


class SavedPrompts:
    """Prompts that a server which ended has kept.

    Args:
        store: where they are.
        model: fingerprint of what is served. What another one has generated is not used.
    """

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._model = model

    def save(self, prompts: Iterable[Owned], seconds: float = math.inf) -> int:
        """Save prompts in their order; how many are on the disk then. An error of the disk is logged, and ends it.

        What their candidates have generated must be `portable`. ``seconds``: after them no other document is begun.
        """
        until, saved, size = time.monotonic() + seconds, 0, 0
        documents: list[bytes] = []
        try:
            for owner, prompt in prompts:
                if time.monotonic() >= until:
                    break
                number = 2 if prompt.prompt.chat_options is None else 3
                fields = (number, self._model, owner, prompt.prompt, prompt.identity, prompt.group)
                documents.append(_ENCODER.encode(fields))
                size += len(documents[-1])
                if size >= WRITE_BYTES:
                    self._store.add_carried(documents)
                    saved, documents, size = saved + len(documents), [], 0
            self._store.add_carried(documents)
            saved += len(documents)
        except StateError as error:
            logger.error("prompts that were carried over cannot be saved: %s", error)
        return saved

    async def save_in_time(
        self, prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any], *, with_tokens: bool
    ) -> int:
        """Save prompts at shutdown, as many as there is time for; log and return how many of them are lost.

        ``with_tokens``: otherwise they start again. So do those whose tokens cannot be saved, or not in time.
        """
        ready: list[Owned] = []
        restarted: list[Exception] = []
        until = asyncio.get_running_loop().time() + PORTABLE_SECONDS
        for owner, prompt in prompts:
            group = None
            if with_tokens and prompt.group is not None:
                try:
                    async with asyncio.timeout_at(until):
                        await asyncio.sleep(0)  # most take no turn of the event loop, which would not see the timeout
                        group = await portable(prompt.group, renderer)
                except Exception as error:  # one output without a text must not lose all prompts
                    restarted.append(error)
            ready.append((owner, replace(prompt, group=group)))
        saved = await asyncio.to_thread(self.save, ready, SAVE_SECONDS)
        lost = len(prompts) - saved
        _log_errors(restarted, "start again: what was generated for them could not be saved in time")
        if lost:
            logger.error("%d prompts that were carried over are lost: they could not be saved, or not in time", lost)
        return lost

    def take(self, version: int) -> list[Owned]:
        """Remove and return what was saved: it must not come again if this server does not end in order.

        If they cannot be read or removed, that is logged, and none are returned; a damaged prompt is lost alone.

        ``version``: that this server starts with. Versions are counted from the start of a server, so tokens of any
        other one may be of any weights, and their prompts start again.
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
                fields, group = _DECODER.decode(document), None
                prompt = fields.prompt
                if [prompt.token_ids, prompt.messages, prompt.text].count(None) != 2:
                    raise ValueError("it has no prompt")
            except (StateDamaged, *MALFORMED) as error:
                lost.append(error)
                continue
            try:
                found = _GROUP_DECODER.decode(fields.group) if fields.model == self._model else None
                if found is not None:
                    found = _checked(found)
                    group = found if found.staleness(version) == 0 else None
            except MALFORMED as error:
                restarted.append(error)
            taken.append((fields.owner, CarriedPrompt(prompt, fields.identity, group)))
        _log_errors(lost, "are lost: this version cannot read them")
        _log_errors(restarted, "start again")
        return taken


def _log_errors(errors: Sequence[Exception], end: str) -> None:
    if errors:
        logger.error("%d prompts that were carried over %s (the first: %r)", len(errors), end, errors[0])


async def portable(group: CarriedGroup[Any], renderer: PromptRenderer[Any, Any]) -> CarriedGroup[Any]:
    """Return a group without outputs of the engine: those of candidates that have finished become tokens and text."""
    candidates = list(group.candidates)
    for place, candidate in enumerate(candidates):
        if (result := candidate.result) is not None and result.finish_reason is not None:
            end = SavedEnd(result.finish_reason, (await renderer.to_sample(result.output)).text)
            candidates[place] = replace(candidate, result=None, saved_end=end)
    return replace(group, candidates=candidates)


def _checked(group: CarriedGroup[Any]) -> CarriedGroup[Any]:
    """Return a group that was decoded, with its tokens in arrays.

    Raises:
        ValueError, OverflowError: a server does not save such a group.
    """
    candidates = []
    for candidate in group.candidates:
        prefix, spans = candidate.prefix, candidate.version_spans
        numbers = [*prefix.token_ids, *(version for version, _ in spans), *(tokens - 1 for _, tokens in spans)]
        logprobs = prefix.token_ids if prefix.logprobs is None else prefix.logprobs
        counts = {candidate.tokens, sum(tokens for _, tokens in spans), len(logprobs)}
        if candidate.result is not None or len(counts) > 1 or min(numbers, default=0) < 0:
            raise ValueError("one of its candidates has not as many log-probs or versions as tokens")
        candidates.append(replace(candidate, prefix=compact(prefix)))
    if len({each.prefix.logprobs is None for each in candidates if each.tokens}) > 1:
        raise ValueError("some of its candidates have log-probs, and others not")
    if min(group.tail_seed, default=0) < 0:
        raise ValueError("its seed is negative")
    return replace(group, candidates=candidates)
