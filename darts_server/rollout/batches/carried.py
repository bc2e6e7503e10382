"""Prompts whose groups were not decided, kept for later batches of the same caller."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

Identity = tuple[str, str]
"""A prompt's key, and the key of what the model sees: callers may use one key for several prompts."""


class Carry(StrEnum):
    """What happens to prompts whose groups were not decided when enough others were."""

    DROP = "drop"
    RESTART = "restart"
    """They are kept, and start first in a later batch."""


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """``prompts``: kept for each caller; beyond it the oldest are dropped."""

    prompts: int = 4096


@dataclass(frozen=True, slots=True)
class CarriedPrompt:
    """A prompt whose group was not decided."""

    prompt: PromptSpec
    identity: Identity


class CarriedPrompts:
    """Keep prompts by the name of their caller, in the order in which they came, in memory."""

    def __init__(self, limits: CarryLimits | None = None) -> None:
        self.limits = limits or CarryLimits()
        self._kept: dict[str | None, list[CarriedPrompt]] = {}

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

    def put(self, owner: str | None, prompts: Iterable[CarriedPrompt]) -> None:
        """Keep prompts of a caller, and drop its oldest ones if there are too many."""
        kept = [*self._kept.pop(owner, ()), *prompts]
        excess = max(0, len(kept) - self.limits.prompts)
        if excess:
            logger.warning(
                "%d prompts that were carried over are dropped: at most %d of a caller are kept (--carried-prompts)",
                excess,
                self.limits.prompts,
            )
        if kept[excess:]:
            self._kept[owner] = kept[excess:]


def match(identities: Iterable[Identity], taken: Iterable[CarriedPrompt]) -> Iterator[CarriedPrompt | None]:
    """Yield the taken prompt for each identity, ``None`` where there is none; each taken one is yielded once."""
    left: dict[Identity, list[CarriedPrompt]] = {}
    for carried in taken:
        left.setdefault(carried.identity, []).append(carried)
    for identity in identities:
        found = left.get(identity)
        yield found.pop(0) if found else None
