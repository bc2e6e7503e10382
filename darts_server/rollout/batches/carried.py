"""Prompts whose groups were not decided: kept for later batches of the same caller, and saved for the next server."""

import asyncio
import json
import logging
import math
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic

import numpy as np
from pydantic import TypeAdapter

from darts_server.engine.port import OutputT, PromptRenderer, TokenSlice
from darts_server.exceptions import StateDamaged, StateError
from darts_server.rollout.candidates import CarriedCandidate, SavedEnd, compact
from darts_server.store.carried import CarriedFile
from darts_server.types import FinishReason, PromptSpec

logger = logging.getLogger(__name__)

_PROMPT = TypeAdapter(PromptSpec)
FORMAT = 1
TOKENS, LOGPROBS = "<i4", "<f8"
"""How they are on the disk."""
WRITE_BYTES = 1 << 23
"""Of documents that are written at once: about a tenth of a second."""
PORTABLE_SECONDS, SAVE_SECONDS = 2.0, 4.0
"""For all prompts at shutdown, before a supervisor ends it: to take outputs from the engine, and to write."""
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Raised by documents that have other fields than ours."""
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


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """Of each caller.

    ``prompts``, ``prompt_bytes`` of them and of their candidates: beyond these the oldest are dropped. ``tokens``: that
    are generated; beyond it the oldest prompts start again. ``staleness``: weight versions since the first of these
    tokens; beyond it their prompt starts again.
    """

    prompts: int = 4096
    prompt_bytes: int = 1 << 29
    tokens: int = 1 << 22
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

    def __iter__(self) -> Iterator[Owned]:
        """Iterate over all prompts with the names of their callers, of each the oldest first."""
        return ((owner, prompt) for owner, kept in self._kept.items() for prompt in kept)

    def count(self, owner: str | None) -> int:
        """Return how many prompts of a caller are kept."""
        return len(self._kept.get(owner, ()))

    def take(self, owner: str | None, named: Iterable[Identity], *, others: bool) -> list[CarriedPrompt]:
        """Remove and return the caller's prompts that are named, each as often as it is; with ``others`` all."""
        wanted = Counter(named)
        taken: list[CarriedPrompt] = []
        left: list[CarriedPrompt] = []
        for kept in self._kept.pop(owner, ()):
            is_named = wanted[kept.identity] > 0
            wanted[kept.identity] -= is_named
            (taken if is_named or others else left).append(kept)
        if left:
            self._kept[owner] = left
        return taken

    def put(self, owner: str | None, new: Iterable[CarriedPrompt], older: Iterable[CarriedPrompt] = ()) -> None:
        """Keep prompts of a caller, and drop its oldest ones, or what was generated for them, if it is too much.

        ``older``: prompts that were taken before; they are the oldest.
        """
        if not self._may_call(owner):
            _log_without_caller(len([*older, *new]))
            return
        kept = [*older, *self._kept.pop(owner, ()), *new]
        sizes = [each.size_bytes for each in kept]
        excess, total = 0, sum(sizes)
        while excess < len(kept) and (len(kept) - excess > self.limits.prompts or total > self.limits.prompt_bytes):
            total -= sizes[excess]
            excess += 1
        if excess:
            logger.warning(
                "%d prompts that were carried over are dropped: of a caller at most %d are kept (--carried-prompts), "
                "and at most %d bytes of them (half of --kept-bytes)",
                excess,
                self.limits.prompts,
                self.limits.prompt_bytes,
            )
        kept = kept[excess:]
        tokens = sum(each.group.tokens for each in kept if each.group is not None)
        for place, each in enumerate(kept):
            if tokens <= self.limits.tokens:
                break
            if each.group is not None:
                tokens -= each.group.tokens
                kept[place] = replace(each, group=None)
        if kept:
            self._kept[owner] = kept

    def drop_without_caller(self) -> None:
        """Drop the prompts of callers that cannot send requests any more."""
        gone = [owner for owner in self._kept if not self._may_call(owner)]
        _log_without_caller(sum(len(self._kept.pop(owner)) for owner in gone))


def _log_without_caller(prompts: int) -> None:
    if prompts:
        logger.warning("%d prompts that were carried over are dropped: their API key is not valid any more", prompts)


def match(identities: Iterable[Identity], taken: Iterable[CarriedPrompt]) -> Iterator[CarriedPrompt | None]:
    """Yield the taken prompt for each identity, ``None`` where there is none; each taken one is yielded once."""
    left: dict[Identity, list[CarriedPrompt]] = {}
    for carried in taken:
        left.setdefault(carried.identity, []).append(carried)
    for identity in identities:
        found = left.get(identity)
        yield found.pop(0) if found else None


class SavedPrompts:
    """Prompts that a server which ended has kept.

    Args:
        file: where they are.
        model: fingerprint of what is served. What another one has generated is not used.
    """

    def __init__(self, file: CarriedFile, model: str) -> None:
        self._file = file
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
                documents.append(_encode(owner, prompt, self._model))
                size += len(documents[-1])
                if size >= WRITE_BYTES:
                    self._file.add(documents)
                    saved, documents, size = saved + len(documents), [], 0
            self._file.add(documents)
            saved += len(documents)
        except StateError as error:
            logger.error("prompts that were carried over cannot be saved: %s", error)
        return saved

    async def save_in_time(
        self, prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any], *, with_tokens: bool
    ) -> int:
        """Save prompts at shutdown, as many as there is time for; log and return how many of them are lost.

        ``with_tokens``: otherwise they start again.
        """
        if with_tokens:
            prompts = await _all_portable(prompts, renderer)
        else:
            prompts = [(owner, replace(prompt, group=None)) for owner, prompt in prompts]
        saved = await asyncio.to_thread(self.save, prompts, SAVE_SECONDS)
        if lost := len(prompts) - saved:
            logger.error("%d prompts that were carried over are lost: they could not be saved, or not in time", lost)
        return lost

    def take(self, version: int) -> list[Owned]:
        """Remove and return what was saved: it must not come again if this server does not end in order.

        If they cannot be read or removed, that is logged, and none are returned; a damaged prompt is lost alone.

        ``version``: that this server starts with. Versions are counted from the start of a server, so tokens of any
        other one may be of any weights, and their prompts start again.
        """
        try:
            documents = self._file.take()
        except StateError as error:
            logger.error("prompts that were carried over are not used, as they cannot be read or removed: %s", error)
            return []
        return self._decode_all(documents, version)

    def _decode_all(self, documents: Iterable[bytes | StateDamaged], version: int) -> list[Owned]:
        taken: list[Owned] = []
        lost: list[Exception] = []
        restarted: list[Exception] = []
        for document in documents:
            try:
                if isinstance(document, StateDamaged):
                    raise document
                fields, (owner, prompt) = _decode(document)
            except (StateDamaged, *MALFORMED) as error:
                lost.append(error)
                continue
            try:
                if fields["group"] is not None and fields["model"] == self._model:
                    group = _decode_group(fields["group"])
                    versions = {each for candidate in group.candidates for each, _ in candidate.version_spans}
                    if versions <= {version}:  # generated by the present weights
                        prompt = replace(prompt, group=group)
            except MALFORMED as error:
                restarted.append(error)
            taken.append((owner, prompt))
        for errors, end in (lost, "are lost: this version cannot read them"), (restarted, "start again"):
            if errors:
                logger.error("%d prompts that were carried over %s (the first: %r)", len(errors), end, errors[0])
        return taken


async def _all_portable(prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any]) -> list[Owned]:
    """Make prompts portable, and those start again for which there is no time."""
    ready: list[Owned] = []
    try:
        async with asyncio.timeout(PORTABLE_SECONDS):
            for owner, prompt in prompts:
                try:
                    ready.append((owner, await portable(prompt, renderer)))
                except Exception:  # one output without a text must not lose all prompts
                    logger.exception("the prompt %.64r that was carried over starts again", prompt.identity[0])
                    ready.append((owner, replace(prompt, group=None)))
                await asyncio.sleep(0)  # most need no turn of the event loop, and then the timeout would not be seen
    except TimeoutError:
        logger.error(
            "%d prompts that were carried over start again: what was generated for them could not be saved in time",
            len(prompts) - len(ready),
        )
    return ready + [(owner, replace(prompt, group=None)) for owner, prompt in prompts[len(ready) :]]


async def portable(prompt: CarriedPrompt, renderer: PromptRenderer[Any, Any]) -> CarriedPrompt:
    """Return a prompt without outputs of the engine: those of candidates that have finished become tokens and text."""
    if prompt.group is None:
        return prompt
    candidates = list(prompt.group.candidates)
    for place, candidate in enumerate(candidates):
        if (result := candidate.result) is not None and result.finish_reason is not None:
            end = SavedEnd(result.finish_reason, (await renderer.to_sample(result.output)).text)
            candidates[place] = replace(candidate, result=None, saved_end=end)
    return replace(prompt, group=replace(prompt.group, candidates=candidates))


def _encode(owner: str | None, prompt: CarriedPrompt, model: str) -> bytes:
    def encode_candidate(candidate: CarriedCandidate[Any]) -> dict[str, Any]:
        assert candidate.result is None, "it is not portable"
        logprobs, end = candidate.prefix.logprobs, candidate.saved_end
        return {
            "token_ids": _packed(candidate.prefix.token_ids, TOKENS),
            "logprobs": None if logprobs is None else _packed(logprobs, LOGPROBS),
            "version_spans": candidate.version_spans,
            "end": None if end is None else [end.finish_reason, end.text],
        }

    group = prompt.group
    document = {
        "format": FORMAT,
        "model": model,
        "owner": owner,
        "prompt": _PROMPT.dump_json(prompt.prompt, exclude_none=True).decode(),
        "identity": prompt.identity,
        "group": None
        if group is None
        else {
            "terms": group.terms,
            "saturated": group.saturated,
            "tail_seed": list(group.tail_seed),
            "candidates": list(map(encode_candidate, group.candidates)),
        },
    }
    return json.dumps(document).encode()


def _decode(document: bytes) -> tuple[Mapping[str, Any], Owned]:
    """Decode a document, and its prompt without what was generated for it."""
    fields = json.loads(document)
    if fields["format"] != FORMAT:
        raise ValueError(f"its format is {fields['format']}, not {FORMAT}")
    owner, (key, content) = fields["owner"], fields["identity"]
    if not (isinstance(owner, str | None) and isinstance(key, str) and isinstance(content, str)):
        raise ValueError("its owner or its identity is no text")
    prompt = _PROMPT.validate_json(fields["prompt"], strict=True)
    if [prompt.token_ids, prompt.messages, prompt.text].count(None) != 2:
        raise ValueError("it has no prompt")
    return fields, (owner, CarriedPrompt(prompt, (key, content)))


def _decode_group(fields: Mapping[str, Any]) -> CarriedGroup[Any]:
    terms, saturated, tail_seed = fields["terms"], fields["saturated"], fields["tail_seed"]
    candidates = [_decode_candidate(candidate) for candidate in fields["candidates"]]
    if not (isinstance(terms, str) and isinstance(saturated, bool) and _are_counts(tail_seed)):
        raise ValueError("it has other terms or another seed than a group can have")
    if len({candidate.prefix.logprobs is None for candidate in candidates if candidate.tokens}) > 1:
        raise ValueError("some of its candidates have log-probs, and others not")
    return CarriedGroup(terms, saturated, tail_seed, candidates)


def _decode_candidate(fields: Mapping[str, Any]) -> CarriedCandidate[Any]:
    token_ids = _unpacked(fields["token_ids"], TOKENS)
    logprobs = None if fields["logprobs"] is None else _unpacked(fields["logprobs"], LOGPROBS)
    spans = tuple((version, tokens) for version, tokens in fields["version_spans"])
    counts = {len(token_ids), sum(tokens for _, tokens in spans), *([] if logprobs is None else [len(logprobs)])}
    if len(counts) > 1 or not all(_are_counts(span) and span[1] for span in spans) or not _are_counts(token_ids):
        raise ValueError("it has not as many log-probs or versions as tokens")
    end = None
    if fields["end"] is not None:
        reason, text = fields["end"]
        if not isinstance(text, str):
            raise ValueError("its end has no text")
        end = SavedEnd(FinishReason(reason), text)
    return CarriedCandidate(compact(TokenSlice(token_ids, logprobs)), spans, None, end)


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _packed(values: Sequence[float], dtype: str) -> str:
    return b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpacked(packed: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(b64decode(packed), dtype).tolist()
    return values
