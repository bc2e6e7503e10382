"""Losses at deadlines by reported rewards: right answers, and groups that lose all their right answers.

They decide the factor of the policy's deadlines and of the cut length where all candidates are cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log
from typing import Any, ClassVar

import numpy as np

from darts_server.estimates.checks import LARGEST, ROUNDING, check_count, check_number

MEMORY = 5_000
"""Right answers of explored groups after which older answers have faded."""
LOST_REMEMBERED = 25
"""Lost answers in the memory of recent groups, at the largest allowed share. With more it would adapt later."""
MIN_SHARE = 0.002
"""Share of lost answers below which the memory becomes no longer."""
MIN_RIGHT = 50
"""Fewest right answers that show a share of lost answers: at 2 %, one in fifty."""
MIN_RIGHT_GROUPS = 20
"""Fewest groups with a right answer for lost groups to count."""
GROUPS_REMEMBERED = 1_000
"""Rewarded groups after which older groups have faded: five lost groups at half a per cent."""
MIN_GROUP_WEIGHT = 0.05
"""Weight of a group after 3,000 more groups. A smaller sum counts as no group."""
MAX_FIRST_GROUPS = 256
"""Limit of groups that explore because fewer than `MIN_RIGHT` answers are right."""
MAX_FACTOR = 16.0
RATIO_STEP = 1.05
"""Relative width of a bin of lengths."""
BINS_PER_DOUBLING = round(log(2) / log(RATIO_STEP))
LAST_BIN = ceil(log(MAX_FACTOR) / log(RATIO_STEP)) + 1
"""Bin of answers beyond `MAX_FACTOR`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A returned trajectory with a reward.

    ``relative_length``: length relative to the cut length if the group would have waited for the trajectory, and
    otherwise to the deadline, both with a factor of 1; 0 without a deadline. ``is_right``: whether the trajectory was
    right as returned. ``cut``: whether the deadline truncated it. ``weight``: 1 / (its probability to be returned).
    """

    relative_length: float
    is_right: bool
    cut: bool = False
    weight: float = 1.0


Histogram = Sequence[float]
"""Weights of answers by relative length r: bin 0 for r <= 1, bin k for r <= `RATIO_STEP`^k, `LAST_BIN` for the rest."""
EMPTY: Histogram = (0.0,) * (LAST_BIN + 1)


class Losses(ABC):
    """Losses at a deadline, read from a histogram of the lengths of right answers, or of groups with a right answer."""

    __slots__ = ()
    loses_whole_bins: ClassVar[bool]
    """If not, the weight in a bin is spread evenly in the logarithm of length."""

    @abstractmethod
    def _estimate_uncut(self) -> Sequence[float] | None:
        """Return the estimated histogram if nothing had been cut, or None while too little is known."""

    def lost_share(self, factor: float) -> float | None:
        weights = self._estimate_uncut()
        if weights is None:
            return None
        # The bin of the factor is kept as a whole, or up to the factor.
        kept_bins = float(_bin_of(factor))
        if not self.loses_whole_bins:
            kept_bins = log(factor) / log(RATIO_STEP)
        first_lost = floor(kept_bins) + 1
        lost = sum(weights[first_lost:])
        # The first of these bins loses only its part beyond the factor. Beyond the last bin there is none.
        kept_part = kept_bins - floor(kept_bins)
        lost -= kept_part * sum(weights[first_lost : first_lost + 1])
        return lost / sum(weights)

    def smallest_factor(self, max_share: float) -> float:
        """Return the smallest factor, from 1 to `MAX_FACTOR`, that loses at most ``max_share``."""
        weights = self._estimate_uncut()
        if weights is None or max_share >= 1:
            return 1.0
        allowed = max_share * sum(weights)
        # Lose bins from the longest on, until another bin would be too much.
        lost = 0.0
        for number in range(LAST_BIN, 0, -1):
            if lost + weights[number] > allowed:
                # A part of this bin may still be lost.
                lost_part = 0.0
                if not self.loses_whole_bins:
                    lost_part = (allowed - lost) / weights[number]
                return float(min(RATIO_STEP ** (number - lost_part), MAX_FACTOR))
            lost += weights[number]
        return 1.0


@dataclass(frozen=True, slots=True)
class DeadlineLosses(Losses):
    """Right answers that deadlines lose. ``DeadlineLosses(**json)`` restores them.

    Recent groups show how many answers are right before their deadline, and how many are cut. The few explored groups
    show at which lengths longer answers are right.

    ``right``, ``cut``: recent answers that were right, and that were cut and not right. ``explored``: number of right
    answers of explored groups. ``explored_right``, ``explored_all``: right answers and all answers of explored groups.
    ``is_rewarded``: whether rewards of a group with a deadline were reported. ``first_groups``: number of groups that
    explored because too few right answers were known.
    """

    loses_whole_bins = False

    right: Histogram = EMPTY
    cut: Histogram = EMPTY
    explored: float = 0.0
    explored_right: Histogram = EMPTY
    explored_all: Histogram = EMPTY
    is_rewarded: bool = False
    first_groups: int = 0

    def __post_init__(self) -> None:
        if type(self.is_rewarded) is not bool:
            raise ValueError(f"is_rewarded must be true or false, got {self.is_rewarded!r:.40}")
        check_count("first_groups", self.first_groups)
        check_number("explored", self.explored)
        for name in ("right", "cut", "explored_right", "explored_all"):
            _check_histogram(name, getattr(self, name))

    @property
    def should_explore_first(self) -> bool:
        return self.is_rewarded and self.explored < MIN_RIGHT and self.first_groups < MAX_FIRST_GROUPS

    def with_answers(self, answers: Sequence[Answer], explored: bool, max_share: float) -> "DeadlineLosses":
        """``max_share``: largest share of right answers that deadlines may lose."""
        right = [answer for answer in answers if answer.is_right]
        cut = [answer for answer in answers if answer.cut and not answer.is_right]
        # The smaller the share, and the more candidates an answer represents, the more answers are remembered.
        heaviest = max((answer.weight for answer in answers), default=1.0)
        answers_remembered = LOST_REMEMBERED * heaviest / max(max_share, MIN_SHARE)
        fade = (len(right) + len(cut)) / answers_remembered
        losses = replace(
            self,
            right=_with_answers(self.right, right, fade),
            # The answer would have ended in a later bin than its cut.
            cut=_with_answers(self.cut, cut, fade, _nearest_edge_of),
        )
        # Only an explored group shows the answers beyond the deadline.
        if not explored:
            return losses
        explored_fade = len(right) / MEMORY
        num_explored_right = max(0.0, 1 - explored_fade) * self.explored + len(right)
        return replace(
            losses,
            explored=num_explored_right,
            explored_right=_with_answers(self.explored_right, right, explored_fade),
            explored_all=_with_answers(self.explored_all, answers, explored_fade),
        )

    def _estimate_uncut(self) -> list[float] | None:
        # An answer that was cut in a bin is distributed over the explored answers of later bins. Another answer is
        # added to the next bin, with the mean probability to be right: answers that are longer than all explored
        # answers move the deadline in small steps.
        explored_beyond = sum(self.explored_all)
        num_explored_right = self.explored
        if num_explored_right < MIN_RIGHT or not sum(self.right) or not explored_beyond:
            return None
        mean_right = sum(self.explored_right) / explored_beyond
        uncut = []
        # Number of cut answers that each explored answer represents, and that the added answer represents.
        per_explored = 0.0
        per_added = 0.0
        for right, cut, explored_right, explored in zip(
            self.right, self.cut, self.explored_right, self.explored_all, strict=True
        ):
            uncut.append(right + per_explored * explored_right + per_added * mean_right)
            # Explored answers of later bins. Rounding must not make their number negative.
            explored_beyond = max(0.0, explored_beyond - explored)
            # The added answer of the next bin represents only the cut answers of this bin.
            per_added = cut / (explored_beyond + 1)
            per_explored += per_added
        return uncut


@dataclass(frozen=True, slots=True)
class GroupLosses(Losses):
    """Groups whose right answers are all lost at deadlines. ``GroupLosses(**json)`` restores them.

    A group counts at the length of its shortest right answer, relative to the cut length with a factor of 1. A group
    that was cut before it had a right answer counts like the groups that ran longer (the Kaplan-Meier estimate). If
    none ran longer, one group is counted at twice the length, with the mean probability to have a right answer. So
    prompts that are always cut move the deadline until their answers are seen.

    ``right``: groups with a right answer. ``wrong``: groups without, by their longest answer. ``cut``: groups without
    that were cut, by the length of the cut. Older groups fade.
    """

    loses_whole_bins = True
    """Answers to a prompt are often equally long, so a part of a bin is often all groups of a prompt."""

    right: Histogram = EMPTY
    wrong: Histogram = EMPTY
    cut: Histogram = EMPTY

    def __post_init__(self) -> None:
        for name in ("right", "wrong", "cut"):
            _check_histogram(name, getattr(self, name))

    def with_group(self, group: Answer) -> "GroupLosses":
        """Return the losses after another group, given by its shortest right answer, or else by its longest answer."""
        right: list[Answer] = []
        wrong: list[Answer] = []
        cut: list[Answer] = []
        bin_of = _bin_of
        if group.is_right:
            right.append(group)
        elif not group.cut:
            wrong.append(group)
        else:
            # The group would have ended in a later bin than its cut.
            bin_of = _nearest_edge_of
            # Bin LAST_BIN - 1 ends at `MAX_FACTOR`, the latest deadline: no later deadline could keep the group.
            is_cut_at_latest = bin_of(group.relative_length) >= LAST_BIN - 1
            if is_cut_at_latest:
                wrong.append(group)
            else:
                cut.append(group)

        fade = 1 / GROUPS_REMEMBERED
        return GroupLosses(
            right=_with_answers(self.right, right, fade, bin_of),
            wrong=_with_answers(self.wrong, wrong, fade, bin_of),
            cut=_with_answers(self.cut, cut, fade, bin_of),
        )

    def _estimate_uncut(self) -> list[float] | None:
        if sum(self.right) < MIN_RIGHT_GROUPS:
            return None
        # The Kaplan-Meier estimate: each group represents itself, and a share of the groups that were cut in earlier
        # bins.
        uncut = [0.0] * (LAST_BIN + 1)
        represented = 1.0
        ended_beyond = sum(self.right) + sum(self.wrong)
        cut_beyond = sum(self.cut)
        mean_right = sum(self.right) / ended_beyond
        for number, (right, wrong, cut) in enumerate(zip(self.right, self.wrong, self.cut, strict=True)):
            uncut[number] += represented * right

            # Groups of later bins. Rounding must not make their numbers negative.
            ended_beyond = max(0.0, ended_beyond - right - wrong)
            cut_beyond = max(0.0, cut_beyond - cut)
            # If no group ended in a later bin, a group is assumed at twice the length.
            assumed_beyond = 1.0 if ended_beyond < MIN_GROUP_WEIGHT else 0.0
            represented_cut = represented * cut / (ended_beyond + cut_beyond + assumed_beyond)
            uncut[min(number + BINS_PER_DOUBLING, LAST_BIN)] += represented_cut * assumed_beyond * mean_right
            represented += represented_cut
        return uncut


def _check_histogram(name: str, value: Any) -> None:
    weights = np.array(value)
    are_numbers = weights.shape == (LAST_BIN + 1,) and weights.dtype.kind in "if"
    if not are_numbers or not ((weights >= 0) & (weights <= LARGEST)).all():
        raise ValueError(f"{name} must be {LAST_BIN + 1} numbers in [0, {LARGEST:g}]")


def _bin_of(relative_length: float) -> int:
    if relative_length <= 1:
        return 0
    # `ROUNDING` keeps a length at the upper end of a bin in this bin.
    return min(ceil(log(relative_length) / log(RATIO_STEP) - ROUNDING), LAST_BIN)


def _nearest_edge_of(relative_length: float) -> int:
    # Bin k ends at edge k.
    if relative_length <= 1:
        return 0
    return min(round(log(relative_length) / log(RATIO_STEP)), LAST_BIN - 1)


def _with_answers(
    histogram: Histogram,
    answers: Sequence[Answer],
    fade: float,
    bin_of: Callable[[float], int] = _bin_of,
) -> Histogram:
    weights = [max(0.0, 1 - fade) * weight for weight in histogram]
    for answer in answers:
        weights[bin_of(answer.relative_length)] += answer.weight
    return tuple(weights)
