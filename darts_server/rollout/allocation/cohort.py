"""Groups that were allocated together: they share a deadline, and a training step waits for the last of them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from darts_server.policy.cohort_deadline import CohortDeadline, place_of_need
from darts_server.policy.deadline import Deadline
from darts_server.types import CohortRecord, GroupRecord


class CohortMember(Protocol):
    """A group of the cohort."""

    def set_deadline(self, tokens: int, bound: int) -> None:
        """Apply the cohort's deadline, and the length at which every candidate is cut."""
        ...


@dataclass(frozen=True, slots=True)
class CohortTerms:
    """How a cohort was allocated.

    Args:
        policy: name of the policy.
        groups: number of groups.
        mean_candidates: M', candidates per group.
        predicted_seconds: until its last group ends; ``None`` where nothing was predicted.
        deadline: how its deadline is computed; ``None`` if its policy has none.
        tokens: the deadline where it is known from the start.
        few: whether these groups are too few to determine a deadline: then it is ``tokens``, or there is none.
        explored: whether its groups run past the deadline, to measure what the deadline costs.
    """

    policy: str
    groups: int
    mean_candidates: float
    predicted_seconds: float | None = None
    deadline: Deadline | None = None
    tokens: int | None = None
    few: bool = False
    explored: bool = False

    def place(self, completion_place: int, candidates: int) -> int:
        """Which of a group's finished candidates, by length, says how many tokens the group needs."""
        return place_of_need(completion_place, candidates, self.mean_candidates)


class Cohort:
    """Set the deadline of its groups once enough of them have reported how many tokens they need."""

    def __init__(self, terms: CohortTerms, on_end: Callable[[CohortRecord], None], clock: Callable[[], float]) -> None:
        self.terms = terms
        self._deadline = CohortDeadline(None if terms.few else terms.deadline, terms.groups, terms.tokens)
        self._on_end = on_end
        self._clock = clock
        self._started_at = clock()
        self._unfinished = terms.groups
        self._members: set[CohortMember] = set()
        self._generated, self._returned = 0, 0

    @property
    def tokens(self) -> int | None:
        """The deadline in tokens; ``None`` while it is not known."""
        return self._deadline.tokens

    @property
    def bound(self) -> int | None:
        """Length in tokens at which every candidate is cut; ``None`` while the deadline is not known."""
        rule = self.terms.deadline
        return None if rule is None or self.tokens is None else rule.bound_of(self.tokens)

    @property
    def waits_beyond(self) -> int | None:
        """See `CohortDeadline.waits_beyond`."""
        return self._deadline.waits_beyond

    def join(self, member: CohortMember) -> None:
        """Add a group that has started."""
        self._members.add(member)
        if self.tokens is not None:
            asyncio.get_running_loop().call_soon(self._set_deadline, member)

    def report_need(self, member: CohortMember, tokens: int) -> None:
        """See `CohortDeadline.report_need`."""
        with self._sets_deadline():
            self._deadline.report_need(member, tokens)

    def report_minimum(self, member: CohortMember, tokens: int | None) -> None:
        """See `CohortDeadline.report_minimum`."""
        with self._sets_deadline():
            self._deadline.report_minimum(member, tokens)

    def end_group(self, member: CohortMember, record: GroupRecord | None = None) -> None:
        """Remove a group that has ended, with any outcome."""
        if record is not None:
            self._generated += record.generated_tokens
            self._returned += record.returned_tokens
        self._members.discard(member)
        self._remove(member)

    def drop_group(self) -> None:
        """Remove a group whose caller left before it was started."""
        self._remove(object())

    def _remove(self, member: object) -> None:
        self._unfinished -= 1
        with self._sets_deadline():
            self._deadline.remove(member)
        if self._unfinished == 0:
            self._on_end(self._record())

    @contextmanager
    def _sets_deadline(self) -> Iterator[None]:
        """Pass the deadline to all members if what happens here determines it."""
        before = self.tokens
        yield
        if before is None and self.tokens is not None:
            for member in self._members:
                # In a later turn of the loop: the group that has just reported has not acted on its event yet.
                asyncio.get_running_loop().call_soon(self._set_deadline, member)

    def _set_deadline(self, member: CohortMember) -> None:
        if self.tokens is not None and member in self._members and not self.terms.explored:
            assert self.bound is not None
            member.set_deadline(self.tokens, self.bound)

    def _record(self) -> CohortRecord:
        return CohortRecord(
            policy=self.terms.policy,
            groups=self.terms.groups,
            mean_candidates=self.terms.mean_candidates,
            deadline=self.tokens,
            explored=self.terms.explored,
            predicted_seconds=self.terms.predicted_seconds,
            measured_seconds=self._clock() - self._started_at,
            generated_tokens=self._generated,
            returned_tokens=self._returned,
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many candidates one group gets, and its cohort, if its policy allocates groups together.

    ``saturated``: whether its prompt was allocated the maximum, also if it gets fewer candidates because of the load.
    """

    candidates: int
    cohort: Cohort | None = None
    saturated: bool = False

    def drop(self) -> None:
        """Give it back unused, so that its cohort does not wait for the group."""
        if self.cohort is not None:
            self.cohort.drop_group()
