"""Prompts whose groups were not decided, kept for later batches of the same caller."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic

from darts_server.engine.port import OutputT
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

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

    def __iter__(self) -> Iterator[tuple[str | None, CarriedPrompt]]:
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
        excess = self._excess([each.size_bytes for each in kept])
        if excess:
            logger.warning(
                "%d prompts that were carried over are dropped: of a caller at most %d are kept (--carried-prompts), "
                "and at most %d bytes of them (half of --kept-bytes)",
                excess,
                self.limits.prompts,
                self.limits.prompt_bytes,
            )
        if kept := self._within_tokens(kept[excess:]):
            self._kept[owner] = kept

    def drop_without_caller(self) -> None:
        """Drop the prompts of callers that cannot send requests any more."""
        gone = [owner for owner in self._kept if not self._may_call(owner)]
        _log_without_caller(sum(len(self._kept.pop(owner)) for owner in gone))

    def _excess(self, sizes: Sequence[int]) -> int:
        """Return how many of the prompts, the oldest, are too many."""
        total = sum(sizes)
        for place, size in enumerate(sizes):
            if len(sizes) - place <= self.limits.prompts and total <= self.limits.prompt_bytes:
                return place
            total -= size
        return len(sizes)

    def _within_tokens(self, prompts: list[CarriedPrompt]) -> list[CarriedPrompt]:
        tokens = sum(each.group.tokens for each in prompts if each.group is not None)
        for place, each in enumerate(prompts):
            if tokens <= self.limits.tokens:
                break
            if each.group is not None:
                tokens -= each.group.tokens
                prompts[place] = replace(each, group=None)
        return prompts


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
