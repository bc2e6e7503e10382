import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from darts_server.group.group import Group
from darts_server.policy.deadline import CohortDeadline, Deadline, place_of_need
from darts_server.records import CohortRecord, GroupRecord


class Cohort:
    """Groups that were allocated together. Sets their deadline when enough groups have reported their need in tokens.

    Args:
        record: completed as groups end. Groups of an explored cohort run past the deadline, to measure its cost.
        rule: None for a policy without deadlines.
        on_end: called when the last group has ended or was dropped.
        clock: monotonic seconds.
        num_starting: number of groups that start at once. The deadline counts the others when they start, in place of
            groups that fail or do not count.
        initial_deadline: in tokens, if it is known from the start.
        is_small: whether the cohort has too few groups for a deadline of its own.
    """

    def __init__(
        self,
        record: CohortRecord,
        rule: Deadline | None,
        on_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        num_starting: int,
        on_start: Callable[[], None] | None = None,
        *,
        initial_deadline: int | None = None,
        is_small: bool = False,
    ) -> None:
        self.record = record
        self.rule = rule
        # A small cohort has only its initial deadline, if any.
        deadline_rule = None if is_small else rule
        self.deadline = CohortDeadline(deadline_rule, num_starting, initial_deadline)
        """Changed only by the methods below, which send it to the groups."""
        self.started_at: float | None = None
        """Start of the first group."""
        self._on_start = on_start
        self._on_end = on_end
        self._clock = clock
        self._num_unfinished = record.groups
        # Groups that have not started.
        self._num_counted_unstarted = num_starting
        self._num_uncounted = record.groups - num_starting
        # Setters of the running groups, in starting order.
        self._deadline_setters: dict[object, Callable[[int, int], None]] = {}
        # Each group gets an initial deadline when it joins.
        self._is_deadline_sent = self.deadline.tokens is not None

    def join(self, group: object, set_deadline: Callable[[int, int], None]) -> None:
        """Add a started group. ``set_deadline``: called with the deadline and the cut length, in tokens."""
        self._deadline_setters[group] = set_deadline
        if self._num_counted_unstarted:
            self._num_counted_unstarted -= 1
        else:
            self._num_uncounted -= 1
            self.deadline.add_group()
        if self.started_at is None:
            self.started_at = self._clock()
            if self._on_start is not None:
                self._on_start()
        if self.deadline.tokens is not None:
            asyncio.get_running_loop().call_soon(self._set_group_deadline, group)

    def report_need(self, group: object, tokens: int) -> None:
        self.deadline.report_need(group, tokens)
        self._send_deadline()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """``tokens``: the least that the group can need, or None if it can no longer be complete."""
        self.deadline.report_minimum(group, tokens)
        self._send_deadline()

    def end_group(self, group: object = None, record: GroupRecord | None = None) -> None:
        """Remove a group that has ended, or None if the group never started."""
        if record is not None:
            self.record.add_ended_group(record)
        self._deadline_setters.pop(group, None)
        self._num_unfinished -= 1
        if group is None and self._num_uncounted:
            # The deadline still expects its number of groups: an uncounted group starts instead.
            self._num_uncounted -= 1
        else:
            # The deadline does not wait for the group, also if it never started. Without uncounted groups,
            # `_num_counted_unstarted` does not matter.
            self.deadline.remove(group)
        self._send_deadline()
        if self._num_unfinished == 0:
            self.record.deadline = self.deadline.tokens
            if self.started_at is not None:
                self.record.measured_seconds = self._clock() - self.started_at
            self._on_end(self.record)

    def _send_deadline(self) -> None:
        if self.deadline.tokens is not None and not self._is_deadline_sent:
            self._is_deadline_sent = True
            for group in self._deadline_setters:
                # In a later turn of the event loop: the group that has just reported has not acted on its event yet.
                asyncio.get_running_loop().call_soon(self._set_group_deadline, group)

    def _set_group_deadline(self, group: object) -> None:
        # The group may have ended meanwhile.
        if group in self._deadline_setters and not self.record.explored:
            assert self.rule is not None
            deadline = self.deadline.tokens
            assert deadline is not None
            self._deadline_setters[group](deadline, self.rule.cut_length_of(deadline))


@dataclass(frozen=True, slots=True)
class Allocation:
    """``cohort``: None if the policy does not allocate groups together.
    ``saturated``: whether the prompt was allocated the maximum, before the load reduced it.
    """

    candidates: int
    cohort: Cohort | None = None
    saturated: bool = False

    def drop(self) -> None:
        """Otherwise the cohort would wait for a group that does not start."""
        if self.cohort is not None:
            self.cohort.end_group()


class CohortMember:
    """Reports to a cohort how many tokens a group needs.

    Args:
        completion_place: see `SelectionRule`.
        set_deadline: see `Cohort.join`.
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
        """As reported to the cohort."""
        self._group = group
        # The group needs as many tokens as its candidate of this rank by length has.
        self._rank_of_need = place_of_need(completion_place, candidates, cohort.record.mean_candidates)
        # The pending cut length that the group was reported to exceed.
        self._exceeded_cut_length: int | None = None
        cohort.join(self, set_deadline)

    def report_need(self, *, has_new_candidates: bool) -> None:
        """Report the need, once."""
        if self.tokens_needed is not None or not self._group.is_open:
            return
        self.tokens_needed = self._group.selector.nth_shortest_length(self._rank_of_need)
        if self.tokens_needed is not None:
            self.cohort.report_need(self, self.tokens_needed)
            return
        if self._exceeded_cut_length is not None and (has_new_candidates or self._group.is_paused):
            # Withdraw the minimum: new candidates, and candidates that start after the pause, may be short.
            self._exceeded_cut_length = None
            self.cohort.report_minimum(self, 0)

    @property
    def may_exceed_cut_length(self) -> bool:
        """Whether `report_if_over_cut_length` may report something now or later."""
        return self.cohort.rule is not None and self.tokens_needed is None

    def report_if_over_cut_length(self, generated_tokens: Callable[[], Mapping[int, int]]) -> None:
        """Report that the group needs more than the cohort's pending cut length, so that the cohort does not wait.

        ``generated_tokens``: returns tokens of running candidates by index.
        """
        if not self.may_exceed_cut_length or self._group.is_paused:
            return
        # The cut length if all groups without a reported need turn out to need more.
        pending_cut_length = self.cohort.deadline.pending_cut_length
        if pending_cut_length is None or pending_cut_length == self._exceeded_cut_length:
            return
        min_tokens_needed = self._group.selector.min_nth_shortest_length(self._rank_of_need, generated_tokens())
        # None: too few candidates are valid or running for any length.
        if min_tokens_needed is None or min_tokens_needed > pending_cut_length:
            self._exceeded_cut_length = pending_cut_length
            self.cohort.report_minimum(self, min_tokens_needed)

    def end(self, record: GroupRecord | None) -> None:
        self.cohort.end_group(self, record)
