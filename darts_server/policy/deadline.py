"""The deadline of a cohort: the number of tokens after which its groups stop waiting for their tails.

An extension of ours: it is a quantile of the groups' completion lengths, as a rule the lengths of their M-th shortest
trajectories. If deadlines lose too many right answers, a factor makes them later (see `deadline_losses`). Every
candidate is cut at the cut length, a multiple of the deadline.
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
CUT_FACTOR = 2.0
"""Twice the deadline is enough for most groups that are not complete at the deadline."""
MIN_DEADLINE = 1
"""Smallest deadline in tokens. Losses are relative to the deadline, so it cannot be 0."""
MIN_KNOWN = 0.75
"""Share of a cohort's groups with a completion length that decides the deadline alone. With DeepCoder-14B, 19 % of the
prompts have too few answers that end before the length limit."""
EXTENSION_POWER = 3
"""Power of (`MIN_KNOWN` / share of groups with a completion length) by which the deadline becomes later: 3.4 times with
half of the groups."""
MAX_EXTENSION = 4.0
"""With it, a batch of runaways is cut at eight times the deadline of earlier groups."""
MIN_GROUPS = 8
"""Fewest groups with a meaningful quantile."""
WINDOW = 256
"""Number of latest groups that serve as a cohort, as usual in a step."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How a cohort's deadline is computed.

    ``quantile``: of the groups' completion lengths, in (0, 1]. ``exploration``: share of cohorts whose tails run past
    the deadline, to measure losses. ``max_lost``: largest share of losses. ``factor``: factor on the deadline, at
    least 1. ``cut_factor``: largest length of a candidate as a multiple of the deadline, at least 1. ``recent``:
    quantile of earlier groups in tokens, for cohorts with too few completion lengths.
    """

    quantile: float = QUANTILE
    exploration: float = EXPLORATION
    max_lost: MaxLost = field(default_factory=MaxLost)
    factor: float = 1.0
    cut_factor: float = CUT_FACTOR
    recent: int | None = None

    def from_lengths(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Return the deadline in tokens of a cohort of ``groups``, or None while too few lengths are known."""
        tokens = self.quantile_of(completion_lengths, groups)
        if tokens is None:
            return None
        return self._multiply(tokens)

    def quantile_of(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        # Unknown lengths count as longest.
        rank = ceil(self.quantile * groups - ROUNDING)
        known_lengths = sorted(completion_lengths)
        if not 0 < rank <= len(known_lengths):
            return None
        return known_lengths[rank - 1]

    def from_known_lengths(self, completion_lengths: Collection[int], num_unknown: int) -> int | None:
        """Return the deadline in tokens if ``num_unknown`` other groups never have a completion length."""
        num_known = len(completion_lengths)
        num_groups = num_known + num_unknown
        if num_known >= MIN_KNOWN * num_groups:
            # The known groups decide alone.
            return self.from_lengths(completion_lengths, num_known)
        if self.recent is None:
            return None
        # The known lengths are the shorter lengths, so earlier groups decide, unless even the known lengths are longer.
        tokens = max(self.recent, self.quantile_of(completion_lengths, num_known) or 0)
        # The more lengths are unknown, the later is the deadline, because these groups may need long answers.
        known_share = num_known / num_groups
        extension = MAX_EXTENSION
        if known_share > 0:
            extension = min(max((MIN_KNOWN / known_share) ** EXTENSION_POWER, 1.0), MAX_EXTENSION)
        return self._multiply(tokens, extension)

    def cut_length_of(self, tokens: int) -> int:
        return ceil(self.cut_factor * tokens - ROUNDING)

    def _multiply(self, tokens: int, extension: float = 1.0) -> int:
        return max(MIN_DEADLINE, ceil(self.factor * extension * tokens))


# --- a cohort, and groups that come one at a time ----------------------------


def place_of_need(completion_place: int, candidates: int, mean_candidates: float) -> int:
    """Return the rank of the finished candidate whose length is the number of tokens that the group needs.

    It is the rule's ``completion_place``, or the same share of the candidates if the group has fewer than the mean.
    Otherwise a group without spare candidates would report its longest candidate.
    """
    return min(max(ceil(completion_place * candidates / mean_candidates), 1), completion_place)


class CohortDeadline:
    """The deadline of a cohort, computed as its groups report how many tokens they need.

    A group is any hashable value. It reports its need at most once, and no minimum afterwards.

    Args:
        rule: None for no deadline, or for a deadline that is known from the start.
        tokens: this known deadline.
    """

    def __init__(self, rule: Deadline | None, groups: int, tokens: int | None = None) -> None:
        self.tokens = tokens
        self.pending_cut_length: int | None = None
        """The cut length in tokens if all groups without a reported need turn out to need more than the cut length."""
        self._rule = rule
        # Groups that have reported their need, or still may.
        self._num_groups = groups
        self._reported: set[object] = set()
        # With thousands of groups, a report must not sort them.
        self._sorted_needs: list[int] = []
        # Of groups without a reported need. None: too few candidates can be valid.
        self._least_needs: dict[object, int | None] = {}
        self._update()

    def report_need(self, group: object, tokens: int) -> None:
        """Record the length at a group's `place_of_need`."""
        self._reported.add(group)
        insort(self._sorted_needs, tokens)
        self._least_needs.pop(group, None)
        self._update()

    def report_minimum(self, group: object, tokens: int | None) -> None:
        """Record the least that a group can need, or None if it can no longer have enough valid candidates."""
        self._least_needs[group] = tokens
        self._update()

    def add_group(self) -> None:
        self._num_groups += 1
        self._update()

    def remove(self, group: object) -> None:
        """Remove a group that has ended. Its need still counts if it was reported."""
        self._least_needs.pop(group, None)
        if group not in self._reported:
            self._num_groups -= 1
            self._update()

    def _update(self) -> None:
        """Set the deadline if the reports suffice, or else the pending cut length."""
        rule = self._rule
        if rule is None or self.tokens is not None:
            return
        self.pending_cut_length = None
        # Without earlier groups, a deadline needs this many needs. Return early, because sorting them at each report
        # would be slow. The number is one lower, so that rounding does no harm.
        min_needs = min(rule.quantile, MIN_KNOWN) * self._num_groups - 1
        if rule.recent is None and len(self._sorted_needs) < min_needs:
            return
        self.tokens = rule.from_lengths(self._sorted_needs, self._num_groups)
        if self.tokens is not None:
            return
        num_unknown = self._num_groups - len(self._sorted_needs)
        tokens = rule.from_known_lengths(self._sorted_needs, num_unknown)
        if tokens is None:
            return

        # A group that needs more than the cut length will be cut there, so it has no completion length. If this is
        # certain for all other groups, the deadline is known while they still run.
        cut_length = rule.cut_length_of(tokens)
        least_needs = self._least_needs.values()
        if len(least_needs) == num_unknown and all(least is None or least > cut_length for least in least_needs):
            self.tokens = tokens
        else:
            self.pending_cut_length = cut_length


class RecentCompletionLengths:
    """Completion lengths of the last `WINDOW` groups in tokens, for groups that come one at a time.

    0 is a group that was cut at the cut length before it had a completion length. It counts as longer than the others.

    Raises:
        ValueError: a length is not a whole number of at least 0.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._lengths: deque[int] = deque(lengths, maxlen=WINDOW)
        for tokens in self._lengths:
            check_count("lengths", tokens)

    @property
    def state(self) -> list[int]:
        return list(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def deadline(self, rule: Deadline) -> int | None:
        """Return the deadline of the next group in tokens, or None while too few groups are known."""
        if len(self._lengths) < MIN_GROUPS:
            return None
        uncut = self._uncut()
        tokens = rule.from_lengths(uncut, len(self._lengths))
        if tokens is None:
            # Too many groups were cut. With fewer than `MIN_GROUPS` others, `quantile` is None. If these are also less
            # than `MIN_KNOWN` of all, there is no deadline, so that groups show their lengths again.
            rule = replace(rule, recent=self.quantile(rule))
            tokens = rule.from_known_lengths(uncut, len(self._lengths) - len(uncut))
        return tokens

    def quantile(self, rule: Deadline) -> int | None:
        uncut = self._uncut()
        if len(uncut) < MIN_GROUPS:
            return None
        return rule.quantile_of(uncut, len(uncut))

    def _uncut(self) -> list[int]:
        return [tokens for tokens in self._lengths if tokens]
