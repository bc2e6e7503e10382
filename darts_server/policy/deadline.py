"""The deadline of a cohort: up to which length its groups wait for their tails. An extension of ours.

It is a quantile, over the groups of the cohort, of their completion lengths: as a rule the length of a group's M-th
shortest trajectory, when it could be complete without its tail. So most groups lose nothing they need by waiting no
longer. Groups that come one at a time use the completion lengths of the groups before them.

If deadlines take away too many right answers, they are stretched: they become later by a factor, see `deadline_losses`.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import ceil

from darts_server.estimates.checks import ROUNDING, check_count
from darts_server.types import MaxLost

QUANTILE = 0.9
EXPLORATION = 0.05
BOUND = 2.0
"""How many times as long as the deadline any candidate may become. Nine in ten groups are complete at the deadline, so
twice as long is enough for most of the others, and a batch whose last groups run away ends after two deadlines."""
MIN_DEADLINE = 1
"""Tokens: what a candidate lost or kept is measured relative to the deadline, so the deadline cannot be 0."""
MIN_KNOWN = 0.75
"""Share of a cohort's groups without which they do not determine their deadline alone. Of DeepCoder-14B's prompts 19 %
have too few answers that end before the length limit."""
EXTENSION_POWER = 3
"""Power of how far the share of groups with a completion length is below `MIN_KNOWN`, by which the deadline is later.
With half of them it is 3.4 times as long: the fewer there are, the likelier the others need long answers."""
MAX_EXTENSION = 4.0
"""So that a batch of nothing but runaways is cut at eight times the deadline of those before it."""
MIN_GROUPS = 8
"""Groups below which a quantile over them means nothing."""
WINDOW = 256
"""Groups that stand in for the cohort when they come one at a time: a usual number of prompts a step."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How a cohort's deadline is computed.

    ``quantile``: of the groups' completion lengths, in (0, 1]. ``exploration``: share of cohorts whose tails run past
    the deadline, to see what it takes away. ``max_lost``: what that may be. ``stretch``: factor on the deadline, at
    least 1. ``bound``: how many times as long as the deadline a trajectory may become, at least 1.
    ``recent``: the one of earlier groups, before it is stretched, for a cohort in which too few determine their own.
    """

    quantile: float = QUANTILE
    exploration: float = EXPLORATION
    max_lost: MaxLost = field(default_factory=MaxLost)
    stretch: float = 1.0
    bound: float = BOUND
    recent: int | None = None

    def from_lengths(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Compute the deadline in tokens from the lengths known so far of a cohort of ``groups``.

        Lengths that are not known yet count as longer than all known ones, so more of them cannot change the result.
        ``None`` while too few are known.
        """
        tokens = self.quantile_of(completion_lengths, groups)
        return None if tokens is None else self._stretched(tokens)

    def quantile_of(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Return the quantile that the deadline is, before it is stretched; see `from_lengths`."""
        rank = ceil(self.quantile * groups - ROUNDING)
        known = sorted(completion_lengths)
        return known[rank - 1] if 0 < rank <= len(known) else None

    def without_others(self, completion_lengths: Collection[int], others: int) -> int | None:
        """Return the deadline if the ``others`` have no completion length; ``None`` if they are too many for that.

        If they are more than a quarter, it is that of earlier groups or, if these are longer, of those that have one,
        and later the more they are. They may be runaways, but also prompts that need long answers.
        """
        known = len(completion_lengths)
        if known >= MIN_KNOWN * (known + others):
            return self.from_lengths(completion_lengths, known)
        if self.recent is None:
            return None
        tokens = max(self.recent, self.quantile_of(completion_lengths, known) or 0)
        least = MIN_KNOWN / MAX_EXTENSION ** (1 / EXTENSION_POWER)
        extension = max(1.0, float((MIN_KNOWN / max(known / (known + others), least)) ** EXTENSION_POWER))
        return self._stretched(tokens, extension)

    def bound_of(self, tokens: int) -> int:
        """Return the length at which every candidate is cut, for a deadline of ``tokens``."""
        return ceil(self.bound * tokens - ROUNDING)

    def _stretched(self, tokens: int, extension: float = 1.0) -> int:
        """Return the deadline for what it is before it is stretched; ``extension`` is a further factor."""
        return max(MIN_DEADLINE, ceil(self.stretch * extension * tokens))


# --- a cohort, and groups that come one at a time ----------------------------


def place_of_need(completion_place: int, candidates: int, mean_candidates: float) -> int:
    """Return which of a group's finished candidates, by length, says how many tokens the group needs.

    That is the rule's ``completion_place``, as a rule the M-th shortest. In a group with fewer candidates than the
    cohort's mean it is the same share of them, or groups without spare candidates would report their longest. In a
    group with more it stays the same: its rule may stop the others as soon as that one is known.
    """
    return min(max(ceil(completion_place * candidates / mean_candidates), 1), completion_place)


class CohortDeadline:
    """The deadline of a cohort, once enough of its groups have reported how many tokens they need.

    Groups may be any values that can be keys. Each reports its need at most once, and no minimum afterwards.

    Args:
        rule: how the deadline is computed, unless it is ``tokens``; ``None`` if there is none.
        groups: number of groups in the cohort.
        tokens: the deadline where it is known from the start.
    """

    def __init__(self, rule: Deadline | None, groups: int, tokens: int | None = None) -> None:
        self.tokens = tokens
        """The deadline in tokens; ``None`` while it is not known."""
        self.pending_bound: int | None = None
        """In tokens: what the bound will be if all groups that have not reported their need say that they need more."""
        self._rule = rule
        self._reporting = groups  # groups that have reported their need, or still may
        self._have_reported: set[object] = set()  # their need
        self._lengths: list[int] = []  # the needs, sorted: a report of one of thousands of groups must not sort them
        self._minimums: dict[object, int | None] = {}  # of groups that have not reported their need
        self._determine()

    def report_need(self, group: object, tokens: int) -> None:
        """Record how many tokens a group needs: the length at its `place_of_need`."""
        self._have_reported.add(group)
        insort(self._lengths, tokens)
        self._minimums.pop(group, None)
        self._determine()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """Record the least that a group can need; ``None`` if it cannot have enough valid candidates any more."""
        self._minimums[group] = tokens
        self._determine()

    def remove(self, group: object) -> None:
        """Remove a group that has ended. What it needs still counts, if it was reported."""
        self._minimums.pop(group, None)
        if group not in self._have_reported:
            self._reporting -= 1
            self._determine()

    def _determine(self) -> None:
        rule, known = self._rule, self._lengths
        if rule is None or self.tokens is not None:
            return
        self.pending_bound = None
        is_too_few = len(known) + 1 < min(rule.quantile, MIN_KNOWN) * self._reporting  # one more for rounding
        if is_too_few and rule.recent is None:
            return
        self.tokens = rule.from_lengths(known, self._reporting)
        others = self._reporting - len(known)
        tokens = rule.without_others(known, others) if self.tokens is None else None
        if tokens is None:
            return
        # A group that could only be complete beyond the bound will be cut there, so it counts as one without a
        # completion length, as soon as nothing that runs in it is shorter. So the deadline becomes known although some
        # groups, or with a deadline of earlier groups most of them, wait for runaways.
        bound = rule.bound_of(tokens)
        minimums = self._minimums.values()
        if len(minimums) == others and all(minimum is None or minimum > bound for minimum in minimums):
            self.tokens = tokens
        else:
            self.pending_bound = bound


class RecentCompletionLengths:
    """Completion lengths of the last `WINDOW` groups, in tokens, for groups that come one at a time.

    0 stands for a group that was cut at the bound before it had one. Such groups count as longer than the others.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """Raise ``ValueError`` if a length is no whole number of at least 0."""
        self._lengths: deque[int] = deque(lengths, maxlen=WINDOW)
        for tokens in self._lengths:
            check_count("lengths", tokens)

    @property
    def state(self) -> list[int]:
        """Argument of the constructor that restores it, oldest first."""
        return list(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def deadline(self, rule: Deadline) -> int | None:
        """Return the deadline of the next group; ``None`` while fewer than `MIN_GROUPS` are known.

        If more than a quarter was cut, it is later the more these are, and there is none if fewer than `MIN_GROUPS`
        were not: then groups show their lengths again.
        """
        if len(self._lengths) < MIN_GROUPS:
            return None
        known = self._known()
        tokens = rule.from_lengths(known, len(self._lengths))
        if tokens is None:
            rule = replace(rule, recent=self.quantile(rule))
            tokens = rule.without_others(known, len(self._lengths) - len(known))
        return tokens

    def quantile(self, rule: Deadline) -> int | None:
        """Return the quantile of those that were not cut, before it is stretched; ``None`` below `MIN_GROUPS`."""
        known = self._known()
        return rule.quantile_of(known, len(known)) if len(known) >= MIN_GROUPS else None

    def _known(self) -> list[int]:
        return [tokens for tokens in self._lengths if tokens]
