"""The deadline that the groups of a cohort determine together, from what they report while they run."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import ceil

from darts_server.policy.deadline import MIN_KNOWN, Deadline


def place_of_need(completion_place: int, candidates: int, mean_candidates: float) -> int:
    """Return which of a group's finished candidates, by length, says how many tokens the group needs.

    That is the rule's ``completion_place``, as a rule the M-th shortest. In a group with fewer candidates than the
    cohort's mean it is the same share of them, or groups without spare candidates would report their longest. In a
    group with more it stays the same: its rule may stop the others as soon as that one is known.
    """
    return min(max(ceil(completion_place * candidates / mean_candidates), 1), completion_place)


class CohortDeadline:
    """The deadline of a cohort, once enough of its groups have reported how many tokens they need.

    Groups may be any values that can be keys. One that starts again reports again, and what it reports last counts.

    Args:
        rule: how the deadline is computed, unless it is ``tokens``; ``None`` if there is none.
        groups: number of groups in the cohort.
        tokens: the deadline where it is known from the start.
    """

    def __init__(self, rule: Deadline | None, groups: int, tokens: int | None = None) -> None:
        self.tokens = rule.fixed if tokens is None and rule is not None else tokens
        """The deadline in tokens; ``None`` while it is not known."""
        self.waits_beyond: int | None = None
        """Length in tokens beyond which groups that have not reported their need shall report a minimum of it."""
        self._rule = rule
        self._reporting = groups  # groups that have reported their need, or still may
        self._needs: dict[object, int] = {}
        self._lengths: list[int] = []  # the needs, sorted: a report of one of thousands of groups must not sort them
        self._minimums: dict[object, int | None] = {}  # of groups that have not reported their need
        self._determine()

    @property
    def is_awaited(self) -> bool:
        """Whether it is not known, and what groups report may determine it."""
        return self._rule is not None and self.tokens is None

    def set_rule(self, rule: Deadline | None, tokens: int | None = None) -> None:
        """Compute the deadline by a rule that was not known before, also from what was reported until now.

        ``tokens``: the deadline where it is known from the start.
        """
        self.tokens = rule.fixed if tokens is None and rule is not None else tokens
        self._rule = rule
        self._determine()

    def report_need(self, group: object, tokens: int) -> None:
        """Record how many tokens a group needs: the length at its `place_of_need`."""
        if (earlier := self._needs.get(group)) is not None:
            del self._lengths[bisect_left(self._lengths, earlier)]
        self._needs[group] = tokens
        insort(self._lengths, tokens)
        self._minimums.pop(group, None)
        self._determine()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """Record the least that a group can need; ``None`` if it cannot have enough valid candidates any more.

        It does not count if the group has reported its need before it started again.
        """
        if group not in self._needs:
            self._minimums[group] = tokens
            self._determine()

    def remove(self, group: object) -> None:
        """Remove a group that has ended. What it needs still counts, if it was reported."""
        self._minimums.pop(group, None)
        if group not in self._needs:
            self._reporting -= 1
            self._determine()

    def count_without(self, groups: Iterable[object]) -> int:
        """Return how many have reported their need, or still may, once these are removed too."""
        return self._reporting - sum(group not in self._needs for group in groups)

    def add(self, group: object) -> None:
        """Count a group again that was removed, as it starts again."""
        if group not in self._needs:
            self._reporting += 1
            self._determine()

    def _determine(self) -> None:
        rule = self._rule
        if rule is None or self.tokens is not None:
            return
        self.waits_beyond = None
        known = len(self._lengths)
        is_too_few = known + 1 < min(rule.quantile, MIN_KNOWN) * self._reporting  # one more for rounding
        if is_too_few and rule.recent is None:
            return
        others = self._reporting - known
        minimums = [*self._minimums.values(), *[0] * (others - len(self._minimums))]
        self.tokens = rule.of_cohort(self._lengths, minimums)
        without_others = None if self.tokens is not None else rule.without_others(self._lengths, others)
        self.waits_beyond = None if without_others is None else rule.bound_of(without_others)
