"""What one group reports to its cohort."""

from collections.abc import Mapping
from typing import Any

from darts_server.engine.port import RunningCandidate
from darts_server.policy.group import Group
from darts_server.policy.selection import SelectionRule
from darts_server.records import GroupRecord
from darts_server.rollout.allocation.cohort import Allocation, Cohort, CohortMember


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
        cohort.join(self._member, allocation.number)

    def set_candidates(self, rule: SelectionRule, candidates: int) -> None:
        """Set the number of candidates, on which it depends how long the candidates are that the group needs."""
        if self.cohort is not None:
            self._place = self.cohort.terms.place(rule.completion_place, candidates)

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
