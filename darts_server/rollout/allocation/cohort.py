"""Groups that were allocated together: they share a deadline, and their time is what a training step waits for."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from darts_server.policy.deadline import Deadline
from darts_server.types import CohortRecord, GroupRecord


class CohortMember(Protocol):
    """A group of the batch."""

    def limit(self, tokens: int) -> None:
        """The batch's deadline is known."""
        ...


@dataclass(frozen=True, slots=True)
class CohortTerms:
    """What a batch was given.

    ``mean_candidates``: M'. ``predicted_seconds``: ``None`` where nothing was predicted. ``deadline``: how its groups
    make it together, ``None`` if they do not. ``tokens``: the deadline where it is known from the start. ``explored``:
    whether its groups run past the deadline, to see what it takes away.
    """

    policy: str
    groups: int
    mean_candidates: float
    predicted_seconds: float | None = None
    deadline: Deadline | None = None
    tokens: int | None = None
    explored: bool = False

    def place(self, size: int, candidates: int) -> int:
        """Whose length, among a group's finished candidates, says how long the group needs.

        That is the M-th shortest. Of a group with fewer candidates than the mean it is the same share of them, or else
        groups without spare ones would tell their longest; of one with more it is not, since a rule may stop the rest
        when the M-th shortest is known.
        """
        return min(max(ceil(size * candidates / self.mean_candidates), 1), size)


class Cohort:
    """Tells its groups the deadline once enough of them know their M-th shortest length."""

    def __init__(self, terms: CohortTerms, on_end: Callable[[CohortRecord], None], clock: Callable[[], float]) -> None:
        self.terms = terms
        self.tokens = terms.tokens
        self._on_end = on_end
        self._clock = clock
        self._began_at = clock()
        self._left = terms.groups
        self._expected = terms.groups  # that may still tell what they need
        self._members: set[CohortMember] = set()
        self._needs: dict[CohortMember, int] = {}
        self._generated, self._returned = 0, 0

    def join(self, member: CohortMember) -> None:
        """A group of the batch began."""
        self._members.add(member)
        if self.tokens is not None:
            asyncio.get_running_loop().call_soon(self._announce, member)

    def needs(self, member: CohortMember, tokens: int) -> None:
        """How long a group needs became known: the length at its `CohortTerms.place`."""
        self._needs[member] = tokens
        self._look()

    def ended(self, member: CohortMember, record: GroupRecord | None = None) -> None:
        """A group ended, whichever way."""
        if record is not None:
            self._generated += record.generated_tokens
            self._returned += record.returned_tokens
        self._members.discard(member)
        self._leave(told=member in self._needs)

    def dropped(self) -> None:
        """A group's caller went away before it began."""
        self._leave(told=False)

    def _leave(self, told: bool) -> None:
        self._left -= 1
        if not told:
            self._expected -= 1
            self._look()
        if self._left == 0:
            self._on_end(self._record())

    def _look(self) -> None:
        if self.terms.deadline is None or self.tokens is not None:
            return
        self.tokens = self.terms.deadline.from_lengths(self._needs.values(), self._expected)
        if self.tokens is not None:
            for member in self._members:
                # In a turn of its own: the group that brought the news has not acted on it yet.
                asyncio.get_running_loop().call_soon(self._announce, member)

    def _announce(self, member: CohortMember) -> None:
        if self.tokens is not None and member in self._members and not self.terms.explored:
            member.limit(self.tokens)

    def _record(self) -> CohortRecord:
        return CohortRecord(
            policy=self.terms.policy,
            groups=self.terms.groups,
            mean_candidates=self.terms.mean_candidates,
            deadline=self.tokens,
            explored=self.terms.explored,
            predicted_seconds=self.terms.predicted_seconds,
            measured_seconds=self._clock() - self._began_at,
            generated_tokens=self._generated,
            returned_tokens=self._returned,
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one group was given: its number of candidates, and the batch it belongs to, if its policy has batches."""

    candidates: int
    batch: Cohort | None = None
