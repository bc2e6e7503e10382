"""Undecided prompts, kept for later batches of the same caller, and saved for the next server."""

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
"""One write takes about a tenth of a second."""
PORTABLE_SECONDS = 2.0
"""Time at shutdown to take outputs from the engine. A supervisor kills a server that is slow to end."""
SAVE_SECONDS = 4.0
"""Time at shutdown to write all prompts."""
MALFORMED = (ValueError, OverflowError, RecursionError)
"""Errors of documents that are not ours. Errors of msgspec are ``ValueError``."""
CANDIDATE_BYTES = 500
"""Memory of a carried candidate without its tokens."""
Identity = tuple[str, str]
"""A prompt's key, and a hash of what the model sees: several prompts may have one key."""


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
    """Limits for one caller.

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

    def staleness(self, weight_version: int) -> int:
        """Return the largest difference of the tokens' weight versions from ``weight_version``."""
        differences = []
        for candidate in self.candidates:
            for token_version, _ in candidate.version_spans:
                differences.append(abs(weight_version - token_version))
        return max(differences, default=0)


@dataclass(frozen=True, slots=True)
class CarriedPrompt:
    """Without a ``group`` the prompt starts again."""

    prompt: PromptSpec
    identity: Identity
    group: CarriedGroup[Any] | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.group is None else self.group.tokens

    @property
    def size_bytes(self) -> int:
        """Approximate memory without tokens, which have a limit of their own."""
        size = self.prompt.size_bytes
        if self.group is not None:
            size += len(self.group.terms) + CANDIDATE_BYTES * len(self.group.candidates)
        return size


OwnedPrompt = tuple[str | None, CarriedPrompt]


class CarriedPrompts:
    """Keep prompts by the name of their caller, the oldest first.

    ``may_call``: returns whether a caller of this name can still send requests. Otherwise no caller can take its
    prompts, and they are dropped.
    """

    def __init__(
        self, limits: CarryLimits | None = None, may_call: Callable[[str | None], bool] = lambda _: True
    ) -> None:
        self.limits = limits or CarryLimits()
        self._may_call = may_call
        self._prompts_by_owner: dict[str | None, list[CarriedPrompt]] = {}
        # Metrics read the sum, and there may be thousands of prompts.
        self._tokens_by_owner: dict[str | None, int] = {}

    def __iter__(self) -> Iterator[OwnedPrompt]:
        for owner, prompts in self._prompts_by_owner.items():
            for prompt in prompts:
                yield owner, prompt

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self._prompts_by_owner.values()))

    @property
    def num_tokens(self) -> int:
        return sum(self._tokens_by_owner.values())

    def count(self, owner: str | None) -> int:
        return len(self._prompts_by_owner.get(owner, ()))

    def take(
        self, owner: str | None, identities: Sequence[Identity], *, others: bool
    ) -> list[tuple[int | None, CarriedPrompt]]:
        """Remove and return prompts, the oldest first, each with its index in ``identities`` or None.

        A prompt is taken as often as it is in ``identities``. ``others``: take all other prompts too.
        """
        # The indices of each identity, the last first.
        unused_indices: dict[Identity, list[int]] = {}
        for index in reversed(range(len(identities))):
            unused_indices.setdefault(identities[index], []).append(index)
        taken: list[tuple[int | None, CarriedPrompt]] = []
        remaining: list[CarriedPrompt] = []
        for prompt in self._prompts_by_owner.pop(owner, ()):
            indices = unused_indices.get(prompt.identity)
            if indices:
                taken.append((indices.pop(), prompt))
            elif others:
                taken.append((None, prompt))
            else:
                remaining.append(prompt)
        self._set_prompts(owner, remaining)
        return taken

    def put(self, owner: str | None, new: Iterable[CarriedPrompt], older: Iterable[CarriedPrompt] = ()) -> None:
        """Keep prompts within the limits. ``older``: go before the kept prompts."""
        prompts = [*older, *self._prompts_by_owner.pop(owner, ()), *new]
        kept_prompts: list[CarriedPrompt] = []
        total_bytes = 0
        total_tokens = 0
        for prompt in reversed(prompts):
            total_bytes += prompt.size_bytes
            total_tokens += prompt.tokens
            if len(kept_prompts) == self.limits.prompts or total_bytes > self.limits.prompt_bytes:
                break
            if total_tokens > self.limits.tokens:
                prompt = replace(prompt, group=None)
            kept_prompts.append(prompt)
        self._set_prompts(owner, kept_prompts[::-1])
        num_dropped = len(prompts) - len(kept_prompts)
        if num_dropped:
            logger.warning(
                "%d prompts that were carried over are dropped: at most %d are kept for a caller (--carried-prompts), "
                "with at most %d bytes (half of --kept-bytes)",
                num_dropped,
                self.limits.prompts,
                self.limits.prompt_bytes,
            )
        # A batch may end after its caller's key was removed.
        self.drop_prompts_without_caller()

    def _set_prompts(self, owner: str | None, prompts: list[CarriedPrompt]) -> None:
        self._prompts_by_owner.pop(owner, None)
        self._tokens_by_owner.pop(owner, None)
        if prompts:
            self._prompts_by_owner[owner] = prompts
            self._tokens_by_owner[owner] = sum(prompt.tokens for prompt in prompts)

    def drop_prompts_without_caller(self) -> None:
        num_dropped = 0
        for owner in list(self._prompts_by_owner):
            if not self._may_call(owner):
                num_dropped += self.count(owner)
                self._set_prompts(owner, [])
        if num_dropped:
            logger.warning(
                "%d prompts that were carried over are dropped: their API key is not valid any more", num_dropped
            )


class _SavedPrompt(msgspec.Struct, array_like=True):
    """A prompt on the disk. ``group`` is decoded separately, so that an error in it loses tokens alone.

    ``format``: 3 with `PromptSpec.chat_options`.
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
    """``model``: fingerprint of the served model. Tokens of other models are not used."""

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._model = model

    def save(self, prompts: Iterable[OwnedPrompt], seconds: float = math.inf) -> int:
        """Save portable prompts until ``seconds`` have passed; return how many are on the disk."""
        ends_at = time.monotonic() + seconds
        num_saved = 0
        unsaved_documents: list[bytes] = []
        unsaved_bytes = 0
        try:
            for owner, prompt in prompts:
                if time.monotonic() >= ends_at:
                    break
                # Older versions read format 2, and would ignore chat options silently.
                format_number = 2 if prompt.prompt.chat_options is None else 3
                # The fields of `_SavedPrompt`.
                fields = (format_number, self._model, owner, prompt.prompt, prompt.identity, prompt.group)
                document = _ENCODER.encode(fields)
                unsaved_documents.append(document)
                unsaved_bytes += len(document)
                if unsaved_bytes >= WRITE_BYTES:
                    self._store.add_carried(unsaved_documents)
                    num_saved += len(unsaved_documents)
                    unsaved_documents = []
                    unsaved_bytes = 0
            self._store.add_carried(unsaved_documents)
            num_saved += len(unsaved_documents)
        except StateError as error:
            logger.error("prompts that were carried over cannot be saved: %s", error)
        return num_saved

    async def save_in_time(
        self, prompts: Sequence[OwnedPrompt], renderer: PromptRenderer[Any, Any], *, with_tokens: bool
    ) -> int:
        """Save prompts at shutdown, without tokens that take too long; return the number of lost prompts."""
        prompts_to_save: list[OwnedPrompt] = []
        token_errors: list[Exception] = []
        ends_at = asyncio.get_running_loop().time() + PORTABLE_SECONDS
        for owner, prompt in prompts:
            group = None
            if with_tokens and prompt.group is not None:
                try:
                    async with asyncio.timeout_at(ends_at):
                        # Most groups take no turn of the event loop, so the timeout would never be seen.
                        await asyncio.sleep(0)
                        group = await make_portable(prompt.group, renderer)
                except Exception as error:
                    # One output that cannot be read must not lose all prompts.
                    token_errors.append(error)
            prompts_to_save.append((owner, replace(prompt, group=group)))
        num_saved = await asyncio.to_thread(self.save, prompts_to_save, SAVE_SECONDS)
        num_lost = len(prompts) - num_saved
        _log_errors(token_errors, "start again: their tokens could not be saved in time")
        if num_lost:
            logger.error(
                "%d prompts that were carried over are lost: they could not be saved, or not in time", num_lost
            )
        return num_lost

    def take(self, weight_version: int) -> list[OwnedPrompt]:
        """Remove the saved prompts, so that they are not used twice if this server is killed, and return them.

        ``weight_version``: version with which this server starts.
        """
        taken: list[OwnedPrompt] = []
        prompt_errors: list[Exception] = []
        token_errors: list[Exception] = []
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
                # A prompt has exactly one of its three forms.
                if [prompt.token_ids, prompt.messages, prompt.text].count(None) != 2:
                    raise ValueError("it has no prompt")
            except (StateDamaged, *MALFORMED) as error:
                prompt_errors.append(error)
                continue
            group = None
            if fields.model == self._model:
                try:
                    group = _GROUP_DECODER.decode(fields.group)
                    if group is not None:
                        group = _check_group(group)
                except MALFORMED as error:
                    group = None
                    token_errors.append(error)
            # Each server counts versions from its start, so tokens of another version have unknown weights.
            if group is not None and group.staleness(weight_version) > 0:
                group = None
            taken.append((fields.owner, CarriedPrompt(prompt, fields.identity, group)))
        _log_errors(prompt_errors, "are lost: this version cannot read them")
        _log_errors(token_errors, "start again")
        return taken


def _log_errors(errors: Sequence[Exception], consequence: str) -> None:
    if errors:
        logger.error("%d prompts that were carried over %s (the first: %r)", len(errors), consequence, errors[0])


async def make_portable(group: CarriedGroup[Any], renderer: PromptRenderer[Any, Any]) -> CarriedGroup[Any]:
    """Replace the engine's outputs by their text."""
    candidates = list(group.candidates)
    for index, candidate in enumerate(candidates):
        result = candidate.result
        if result is not None and result.finish_reason is not None:
            sample = await renderer.to_sample(result.output)
            saved_end = SavedEnd(result.finish_reason, sample.text)
            candidates[index] = replace(candidate, result=None, saved_end=saved_end)
    return replace(group, candidates=candidates)


def _check_group(group: CarriedGroup[Any]) -> CarriedGroup[Any]:
    """Return the checked group with tokens in arrays, or raise one of `MALFORMED`."""
    candidates = []
    have_logprobs = []
    for candidate in group.candidates:
        prefix = candidate.prefix
        span_versions = [version for version, _ in candidate.version_spans]
        span_lengths = [tokens for _, tokens in candidate.version_spans]
        has_wrong_length = sum(span_lengths) != candidate.tokens
        if prefix.logprobs is not None and len(prefix.logprobs) != candidate.tokens:
            has_wrong_length = True
        has_negative = min(prefix.token_ids, default=0) < 0 or min(span_versions, default=0) < 0
        has_empty_span = min(span_lengths, default=1) < 1
        # Outputs of an engine are never saved.
        if candidate.result is not None or has_wrong_length or has_negative or has_empty_span:
            raise ValueError("a candidate has other numbers of log-probs or versions than of tokens")
        if candidate.tokens:
            have_logprobs.append(prefix.logprobs is not None)
        candidates.append(replace(candidate, prefix=copy_to_arrays(prefix)))
    if any(have_logprobs) and not all(have_logprobs):
        raise ValueError("some candidates have log-probs, and others have none")
    if min(group.tail_seed, default=0) < 0:
        raise ValueError("its seed is negative")
    return replace(group, candidates=candidates)
