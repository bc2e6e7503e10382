"""Groups that were allocated together: they share a deadline, and a training step waits for the last of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from darts_server.policy.deadline import CohortDeadline, Deadline
from darts_server.records import CohortRecord, GroupRecord


class Cohort:
    """Set the deadline of its groups once enough of them have reported how many tokens they need.

    Groups may be any values that can be keys.

    Args:
        record: what is known from the start; filled as groups end.
        rule: how the deadline is computed; ``None`` if the policy has none. Groups of a cohort that is ``explored`` run
            past it, to measure what the deadline costs.
        on_end: called with the record when the last group has ended or was dropped.
        clock: monotonic seconds.
        on_start: called when the first group starts, if anything.
        tokens: the deadline where it is known from the start.
        few: whether these groups are too few to determine a deadline: then it is ``tokens``, or there is none.
    """

    def __init__(
        self,
        record: CohortRecord,
        rule: Deadline | None,
        on_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        on_start: Callable[[], None] | None = None,
        *,
        tokens: int | None = None,
        few: bool = False,
    ) -> None:
        self.record, self.rule = record, rule
        self.deadline = CohortDeadline(None if few else rule, record.groups, tokens)
        """Change it by the methods below alone: they pass it on."""
        self.started_at: float | None = None
        """When its first group has started; ``None`` before."""
        self._on_start, self._on_end, self._clock = on_start, on_end, clock
        self._unfinished = record.groups
        self._members: dict[object, Callable[[int, int], None]] = {}  # in the order in which they started
        self._is_passed_on = self.deadline.tokens is not None

    def join(self, group: object, set_deadline: Callable[[int, int], None]) -> None:
        """Add a group that has started. ``set_deadline``: gets the deadline, and the length at which all are cut."""
        self._members[group] = set_deadline
        if self.started_at is None:
            self.started_at = self._clock()
            if self._on_start is not None:
                self._on_start()
        if self.deadline.tokens is not None:
            asyncio.get_running_loop().call_soon(self._set_deadline, group)

    def report_need(self, group: object, tokens: int) -> None:
        """See `CohortDeadline.report_need`."""
        self.deadline.report_need(group, tokens)
        self._pass_on()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """See `CohortDeadline.report_minimum`."""
        self.deadline.report_minimum(group, tokens)
        self._pass_on()

    def end_group(self, group: object = None, record: GroupRecord | None = None) -> None:
        """Remove a group that has ended, with any outcome; ``None`` for one that never started."""
        if record is not None:
            self.record.add(record)
        self._members.pop(group, None)
        self._unfinished -= 1
        self.deadline.remove(group)
        self._pass_on()
        if self._unfinished == 0:
            self.record.deadline = self.deadline.tokens
            self.record.measured_seconds = 0.0 if self.started_at is None else self._clock() - self.started_at
            self._on_end(self.record)

    def _pass_on(self) -> None:
        """Pass the deadline to all members once it is known."""
        if self.deadline.tokens is not None and not self._is_passed_on:
            self._is_passed_on = True
            for group in self._members:
                # In a later turn of the loop: the group that has just reported has not acted on its event yet.
                asyncio.get_running_loop().call_soon(self._set_deadline, group)

    def _set_deadline(self, group: object) -> None:
        if group in self._members and not self.record.explored:
            assert self.rule is not None
            assert self.deadline.tokens is not None
            self._members[group](self.deadline.tokens, self.rule.bound_of(self.deadline.tokens))


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
            self.cohort.end_group()
