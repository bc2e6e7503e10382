"""Groups that were allocated together: they share a deadline, and a training step waits for the last of them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from darts_server.engine.port import RunningCandidate
from darts_server.policy.deadline import CohortDeadline, Deadline, place_of_need
from darts_server.policy.group import Group
from darts_server.policy.selection import SelectionRule
from darts_server.policy.shaping import Shaping
from darts_server.records import ChosenOption, CohortRecord, GroupRecord
from darts_server.rollout.plan import Plan


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
        chosen: what `auto` does with it, and why; ``None`` under other policies.
    """

    policy: str
    groups: int
    mean_candidates: float
    predicted_seconds: float | None = None
    deadline: Deadline | None = None
    tokens: int | None = None
    few: bool = False
    explored: bool = False
    chosen: ChosenOption | None = None


class Cohort:
    """Set the deadline of its groups once enough of them have reported how many tokens they need.

    ``on_start`` is called when the first group starts, ``on_end`` when the last one has ended or was dropped.
    """

    def __init__(
        self,
        terms: CohortTerms,
        on_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.terms = terms
        self._deadline = CohortDeadline(None if terms.few else terms.deadline, terms.groups, terms.tokens)
        self._on_start = on_start
        self._on_end = on_end
        self._clock = clock
        self._started_at: float | None = None
        self._unfinished = terms.groups
        self._members: dict[CohortMember, None] = {}  # a set, in the order in which they started
        self._record = CohortRecord(
            terms.policy,
            terms.groups,
            terms.mean_candidates,
            predicted_seconds=terms.predicted_seconds,
            chosen=terms.chosen,
        )
        self.running = 0
        """Candidates of its groups that the engine runs or queues."""

    @property
    def has_started(self) -> bool:
        """Whether one of its groups has started."""
        return self._started_at is not None

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
        self._members[member] = None
        if self._started_at is None:
            self._started_at = self._clock()
            self._on_start()
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
            self._record.add(record)
        self._members.pop(member, None)
        self._remove(member)

    def drop_group(self) -> None:
        """Remove a group whose caller left before it was started."""
        self._remove(object())

    def _remove(self, member: object) -> None:
        self._unfinished -= 1
        with self._sets_deadline():
            self._deadline.remove(member)
        if self._unfinished == 0:
            record = self._record
            record.deadline, record.explored = self.tokens, self.terms.explored
            record.measured_seconds = 0.0 if self._started_at is None else self._clock() - self._started_at
            self._on_end(record)

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


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many candidates one group gets, and its cohort, if its policy allocates groups together.

    ``saturated``: whether its prompt was allocated the maximum, also if it gets fewer candidates because of the load.
    ``shaping``: chosen for its cohort, in place of its plan's; ``None`` for the plan's. ``share``: returns the share of
    the engine that the cohort has now, and so of the extra candidates while nothing was generated; ``None`` for all.
    """

    candidates: int
    cohort: Cohort | None = None
    saturated: bool = False
    shaping: Shaping | None = None
    share: Callable[[], float] | None = None

    def rule(self, plan: Plan) -> SelectionRule:
        """Build the selection rule of the group."""
        return (self.shaping or plan.shaping).selection_rule(plan.size, self.saturated)

    def drop(self) -> None:
        """Give it back unused, so that its cohort does not wait for the group."""
        if self.cohort is not None:
            self.cohort.drop_group()


class CohortMembership:
    """Report to a group's cohort how many tokens the group needs, and its end.

    A group that was allocated alone never joins one. Then nothing is reported.

    Args:
        member: gets the deadline of the cohort.
        group: the group's state machine.
    """

    def __init__(self, member: CohortMember, group: Group) -> None:
        self.cohort: Cohort | None = None
        self.tokens_needed: int | None = None
        """The length that was reported as needed; ``None`` until then."""
        self._member = member
        self._group = group
        self._place = 1
        self._beyond: int | None = None  # the limit for which a minimum was reported, see `Cohort.waits_beyond`

    def join(self, cohort: Cohort, rule: SelectionRule, allocation: Allocation) -> None:
        """Join the cohort of an allocation, before the group is opened with it and this rule."""
        self.cohort = cohort
        self.set_candidates(rule, allocation.candidates)
        cohort.join(self._member)

    def set_candidates(self, rule: SelectionRule, candidates: int) -> None:
        """Set the number of candidates, on which it depends how long the candidates are that the group needs."""
        if self.cohort is not None:
            self._place = place_of_need(rule.completion_place, candidates, self.cohort.terms.mean_candidates)

    def report_need(self) -> None:
        """Report how many tokens the group needs, once that is known."""
        if self.cohort is not None and self.tokens_needed is None and self._group.is_open:
            self.tokens_needed = self._group.standings.nth_shortest(self._place)
            if self.tokens_needed is not None:
                self.cohort.report_need(self._member, self.tokens_needed)

    def report_minimum(self, running: Mapping[int, RunningCandidate[Any]]) -> None:
        """Report, once for each limit, if this group can only be complete beyond what the others allow it.

        ``running``: its running candidates, by index.
        """
        if self.cohort is None or self.tokens_needed is not None or self._group.is_paused:
            return
        if (limit := self.cohort.waits_beyond) not in (None, self._beyond):
            generated = {index: candidate.tokens() or 0 for index, candidate in running.items()}
            minimum = self._group.standings.nth_shortest_minimum(self._place, generated)
            if minimum is None or minimum > limit:
                self._beyond = limit
                self.cohort.report_minimum(self._member, minimum)

    def reset_minimum(self) -> None:
        """Take back the reported minimum: new candidates may be short."""
        if self.cohort is not None and self._beyond is not None and self.tokens_needed is None:
            self._beyond = None
            self.cohort.report_minimum(self._member, 0)

    def end(self, record: GroupRecord | None) -> None:
        """Leave the cohort: the group has ended. ``record``: ``None`` if it could not be made."""
        if self.cohort is not None:
            self.cohort.end_group(self._member, record)
