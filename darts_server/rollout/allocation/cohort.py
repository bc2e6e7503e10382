"""Groups that were allocated together, and share a deadline."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from darts_server.group.group import Group
from darts_server.policy.deadline import CohortDeadline, Deadline, place_of_need
from darts_server.records import CohortRecord, GroupRecord


class Cohort:
    """Set the deadline of its groups when enough groups have reported the tokens that they need.

    Args:
        record: completed as groups end. Groups of an explored cohort run past the deadline, to measure its cost.
        rule: None for a policy without deadlines.
        on_end: called when the last group has ended or was dropped.
        clock: monotonic seconds.
        starting: number of groups that start at once. The others start only in place of groups that fail or do not
            count, so the deadline counts each of them when it starts.
        on_start: called when the first group starts.
        tokens: a deadline that is known from the start.
        few: whether there are too few groups to determine a deadline.
    """

    def __init__(
        self,
        record: CohortRecord,
        rule: Deadline | None,
        on_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        starting: int,
        on_start: Callable[[], None] | None = None,
        *,
        tokens: int | None = None,
        few: bool = False,
    ) -> None:
        self.record = record
        self.rule = rule
        self.deadline = CohortDeadline(None if few else rule, starting, tokens)
        """Changed only by the methods below, which pass the deadline on."""
        self.started_at: float | None = None
        """Start of the first group, in seconds of the clock."""
        self._on_start = on_start
        self._on_end = on_end
        self._clock = clock
        self._unfinished = record.groups
        # Groups that the deadline counts and that have not started, and groups that it does not count yet.
        self._expected = starting
        self._uncounted = record.groups - starting
        # In starting order.
        self._members: dict[object, Callable[[int, int], None]] = {}
        self._is_passed_on = self.deadline.tokens is not None

    def join(self, group: object, set_deadline: Callable[[int, int], None]) -> None:
        """Add a group that has started. ``set_deadline``: called with the deadline and the cut length, in tokens."""
        self._members[group] = set_deadline
        if self._expected:
            self._expected -= 1
        else:
            self._uncounted -= 1
            self.deadline.add_group()
        if self.started_at is None:
            self.started_at = self._clock()
            if self._on_start is not None:
                self._on_start()
        if self.deadline.tokens is not None:
            asyncio.get_running_loop().call_soon(self._set_deadline, group)

    def report_need(self, group: object, tokens: int) -> None:
        self.deadline.report_need(group, tokens)
        self._pass_on_deadline()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """Record the least that a group can need, or None if it can no longer be complete."""
        self.deadline.report_minimum(group, tokens)
        self._pass_on_deadline()

    def end_group(self, group: object = None, record: GroupRecord | None = None) -> None:
        """Remove a group that has ended, or None for a group that never started."""
        if record is not None:
            self.record.add(record)
        self._members.pop(group, None)
        self._unfinished -= 1
        if group is None and self._uncounted:
            self._uncounted -= 1
        else:
            self.deadline.remove(group)
        self._pass_on_deadline()
        if self._unfinished == 0:
            self.record.deadline = self.deadline.tokens
            if self.started_at is not None:
                self.record.measured_seconds = self._clock() - self.started_at
            self._on_end(self.record)

    def _pass_on_deadline(self) -> None:
        """Set the deadline of all groups as soon as it is known, once."""
        if self.deadline.tokens is not None and not self._is_passed_on:
            self._is_passed_on = True
            for group in self._members:
                # A group gets the deadline in a later turn of the event loop, because the group that has just reported
                # has not acted on its event yet.
                asyncio.get_running_loop().call_soon(self._set_deadline, group)

    def _set_deadline(self, group: object) -> None:
        """Set the deadline of a running group, unless the cohort explores."""
        if group in self._members and not self.record.explored:
            assert self.rule is not None
            assert self.deadline.tokens is not None
            self._members[group](self.deadline.tokens, self.rule.cut_length_of(self.deadline.tokens))


@dataclass(frozen=True, slots=True)
class Allocation:
    """The candidates of one group, and its cohort, if the policy allocates groups together.

    ``saturated``: whether the prompt was allocated the maximum, before the load reduced it.
    """

    candidates: int
    cohort: Cohort | None = None
    saturated: bool = False

    def drop(self) -> None:
        """Return the allocation unused, so that the cohort does not wait for the group."""
        if self.cohort is not None:
            self.cohort.end_group()


class CohortMember:
    """Report to a cohort how many tokens one of its groups needs.

    Args:
        group: state machine of the group.
        completion_place: see `SelectionRule`.
        candidates: number of candidates of the group.
        set_deadline: called with the cohort's deadline and the cut length, in tokens.
    """

    def __init__(
        self,
        cohort: Cohort,
        group: Group,
        completion_place: int,
        candidates: int,
        set_deadline: Callable[[int, int], None],
    ) -> None:
        self.cohort = cohort
        self.tokens_needed: int | None = None
        """Tokens that the group needs, as reported to the cohort."""
        self._group = group
        # See `place_of_need`.
        self._place = place_of_need(completion_place, candidates, cohort.record.mean_candidates)
        # The `CohortDeadline.pending_cut_length` for which a minimum was reported.
        self._reported_limit: int | None = None
        cohort.join(self, set_deadline)

    def report_need(self, *, has_new_candidates: bool) -> None:
        """Report once how many tokens the group needs, as soon as that is known.

        ``has_new_candidates``: whether the group has just started candidates.
        """
        if self.tokens_needed is not None or not self._group.is_open:
            return
        self.tokens_needed = self._group.selector.nth_shortest_length(self._place)
        if self.tokens_needed is not None:
            self.cohort.report_need(self, self.tokens_needed)
            return
        if self._reported_limit is not None and (has_new_candidates or self._group.is_paused):
            # New candidates may be short, so the reported minimum does not hold any more.
            self._reported_limit = None
            self.cohort.report_minimum(self, 0)

    @property
    def may_exceed_cut_length(self) -> bool:
        """Whether `report_if_over_cut_length` may report something now or later."""
        return self.cohort.rule is not None and self.tokens_needed is None

    def report_if_over_cut_length(self, generated: Callable[[], Mapping[int, int]]) -> None:
        """Report that the group needs more than the cohort's pending cut length, so that the cohort does not wait.

        The report is made once for each pending cut length.

        ``generated``: returns the number of tokens of each running candidate, by index.
        """
        if not self.may_exceed_cut_length or self._group.is_paused:
            return
        limit = self.cohort.deadline.pending_cut_length
        if limit is None or limit == self._reported_limit:
            return
        minimum = self._group.selector.min_nth_shortest_length(self._place, generated())
        if minimum is None or minimum > limit:
            self._reported_limit = limit
            self.cohort.report_minimum(self, minimum)

    def end(self, record: GroupRecord | None) -> None:
        self.cohort.end_group(self, record)
