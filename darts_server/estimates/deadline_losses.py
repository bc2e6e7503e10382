"""What deadlines take away, by reported rewards: right answers, and all right answers of a group.

It decides by which factor deadlines are stretched.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log
from typing import Any, ClassVar

import numpy as np

from darts_server.estimates.checks import LARGEST, ROUNDING, check_count, check_number

MEMORY = 5_000
"""Right answers of explored groups after which older ones have faded."""
LOST_REMEMBERED = 25
"""Lost answers in the memory of recent groups, at the largest share that may be lost: the fewest from which a share is
known well enough, so that the stretch follows a policy whose answers become shorter as fast as it can."""
MIN_SHARE = 0.002
"""A smaller share of lost answers is remembered as long as this one."""
MIN_RIGHT = 50
"""Right answers below which the share of lost ones is noise: at 2 %, one of fifty."""
MIN_RIGHT_GROUPS = 20
"""Groups with a right answer below which those that lose all of them do not count. So few show no share of half a per
cent: until more are known, a single one moves the deadline, which costs time and takes nothing away."""
GROUPS_REMEMBERED = 1_000
"""Rewarded groups after which older ones have faded: at half a per cent, five that lost all right answers."""
SEEN = 0.05
"""What is left of one group after 3,000 others: below it, none was seen."""
MAX_FIRST_GROUPS = 256
"""Groups that explore for want of `MIN_RIGHT` answers, at most: hardly any is right, or few of them get rewards."""
MAX_STRETCH = 16.0
RATIO_STEP = 1.05
"""Relative width of a bin of lengths."""
TWICE = round(log(2) / log(RATIO_STEP))
"""Bins from a length to twice that."""
LAST_BIN = ceil(log(MAX_STRETCH) / log(RATIO_STEP)) + 1
"""Of answers beyond `MAX_STRETCH`. The bin before it contains `MAX_STRETCH`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A returned trajectory with a reward.

    ``relative_length``: relative to the length that would have discarded it without a stretch, the deadline or, if its
    group would have waited for it, the bound; 0 without a deadline. ``is_right``: whether it was right as it was
    returned. ``cut``: whether it was truncated by its deadline. ``weight``: how many candidates it stands for, 1 /
    (its probability to be returned).
    """

    relative_length: float
    is_right: bool
    cut: bool = False
    weight: float = 1.0


Histogram = Sequence[float]
"""Weights of answers by relative length. Bin 0 holds those up to 1, bin k those from there up to `RATIO_STEP`^k, and
`LAST_BIN` all longer ones."""
EMPTY: Histogram = (0.0,) * (LAST_BIN + 1)


class Losses(ABC):
    """What a deadline takes away, as a histogram of how long right answers, or groups with one, would have become.

    The two kinds of losses differ in how they estimate the histogram from what was seen. Both are read alike.
    """

    __slots__ = ()
    whole_bins: ClassVar[bool]
    """Whether no part of a bin is given up. Otherwise the weight in a bin is spread evenly in the logarithm of the
    length."""

    @abstractmethod
    def _expected(self) -> Sequence[float] | None:
        """Return the histogram as if nothing had been cut; ``None`` while too few are known."""

    def share(self, stretch: float) -> float | None:
        """Return the share beyond a deadline with that stretch; ``None`` while too few are known."""
        weights = self._expected()
        if weights is None:
            return None
        place = _bin(stretch) if self.whole_bins else log(stretch) / log(RATIO_STEP)
        whole = floor(place)
        beyond = sum(weights[whole + 1 :]) - (place - whole) * sum(weights[whole + 1 : whole + 2])
        return beyond / sum(weights)

    def stretch(self, max_share: float) -> float:
        """Return the smallest factor on the deadline, from 1 to `MAX_STRETCH`, that takes at most ``max_share``."""
        weights = self._expected()
        if weights is None or max_share >= 1:
            return 1.0
        allowed = max_share * sum(weights)
        beyond = 0.0
        for number in range(LAST_BIN, 0, -1):
            if beyond + weights[number] > allowed:
                part = 0.0 if self.whole_bins else (allowed - beyond) / weights[number]
                return float(min(RATIO_STEP ** (number - part), MAX_STRETCH))
            beyond += weights[number]
        return 1.0


@dataclass(frozen=True, slots=True)
class DeadlineLosses(Losses):
    """How many right answers deadlines take away, by reported rewards.

    Recent groups show how many answers are right before their deadline, and how many are cut there. Explored groups,
    which are few, show how many of those that are longer would have been right, and at which length. So the share that
    is lost follows a policy whose answers become shorter with every batch, not only with those that explore.

    The stretch is read off the answers' lengths, so it depends on how many were seen and not on how many groups or
    batches they came in. Plain fields: ``DeadlineLosses(**json)`` restores it.

    ``right``, ``cut``: answers of recent groups that were right, and those that were cut and not right, by the length
    at which they were. ``explored``: number of right answers of explored groups. ``explored_right``, ``explored_all``:
    these groups' right answers and all answers. ``is_rewarded``: whether rewards of a group with a deadline were
    reported. ``first_groups``: those that were to explore for want of right answers.
    """

    whole_bins = False

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
        """Whether the next cohort should explore because rewards are reported, and too few show what is lost.

        Otherwise deadlines would be guarded only after the first cohort that explores at random, the twentieth or so.
        """
        return self.is_rewarded and self.explored < MIN_RIGHT and self.first_groups < MAX_FIRST_GROUPS

    def with_answers(self, answers: Sequence[Answer], explored: bool, max_share: float) -> "DeadlineLosses":
        """Return the losses after the answers of one more group, whose deadline may take ``max_share``.

        The smaller that share, and the more candidates an answer stands for, the more answers must be remembered.
        """
        right = [answer for answer in answers if answer.is_right]
        cut = [answer for answer in answers if answer.cut and not answer.is_right]
        heaviest = max((answer.weight for answer in answers), default=1.0)
        fade = (len(right) + len(cut)) * max(max_share, MIN_SHARE) / (LOST_REMEMBERED * heaviest)
        losses = replace(
            self,
            right=_added(self.right, ((_bin(a.relative_length), a.weight) for a in right), fade),
            cut=_added(self.cut, ((_nearest_edge(a.relative_length), a.weight) for a in cut), fade),
        )
        if not explored:
            return losses
        fade = len(right) / MEMORY
        return replace(
            losses,
            explored=max(0.0, 1 - fade) * self.explored + len(right),
            explored_right=_added(self.explored_right, ((_bin(a.relative_length), a.weight) for a in right), fade),
            explored_all=_added(self.explored_all, ((_bin(a.relative_length), a.weight) for a in answers), fade),
        )

    def _expected(self) -> list[float] | None:
        """Return the right answers of recent groups as if nothing had been cut; ``None`` while too few were explored.

        What was cut at bin c becomes longer as explored answers beyond c did, of which some were right. One more is
        counted, as often right as all are, in the next bin: so an answer that is longer than any explored one counts
        too, and moves the deadline by small steps until exploration shows more.
        """
        beyond = sum(self.explored_all)
        if self.explored < MIN_RIGHT or not sum(self.right) or not beyond:
            return None
        mean_right = sum(self.explored_right) / beyond
        expected, per_explored, one_more = [], 0.0, 0.0
        for right, cut, explored_right, explored in zip(
            self.right, self.cut, self.explored_right, self.explored_all, strict=True
        ):
            expected.append(right + per_explored * explored_right + one_more * mean_right)
            beyond = max(0.0, beyond - explored)  # rounding must not make it negative
            one_more = cut / (beyond + 1)
            per_explored += one_more
        return expected


@dataclass(frozen=True, slots=True)
class GroupLosses(Losses):
    """How many of the groups with right answers deadlines take all right answers from, by reported rewards.

    A group's place is the length of its shortest right answer, relative to the bound without a stretch. Groups that
    were cut before they had one count as those of which more was seen (the Kaplan-Meier estimate), whether these were
    explored or had a later deadline. Where none was seen, one is counted, as often right as all are, at twice the
    length: so prompts that are cut whole whenever they come move the deadline, within a few batches, until their
    answers are seen. What was cut at the latest deadline there is counts as wrong, since none can help it.

    A group that was cut at its deadline, before the bound, may have had a right answer between the two. It counts as
    any other, so that a little too much is taken for lost.

    ``right``, ``wrong``, ``cut``: groups with a right answer, by their place; without one, by their longest answer;
    and those of the latter that were cut, by where they were; older ones less. ``GroupLosses(**json)`` restores it.
    """

    whole_bins = True
    """Answers to the same prompt are often equally long, so a part of a bin is often all groups of one prompt."""

    right: Histogram = EMPTY
    wrong: Histogram = EMPTY
    cut: Histogram = EMPTY

    def __post_init__(self) -> None:
        for name in ("right", "wrong", "cut"):
            _check_histogram(name, getattr(self, name))

    def with_group(self, group: Answer) -> "GroupLosses":
        """Return the losses after one more group, described by its shortest right answer or, without one, its longest.

        Older groups fade, so that deadlines follow a policy whose answers become shorter.
        """
        is_cut = group.cut and not group.is_right
        place = _nearest_edge(group.relative_length) if is_cut else _bin(group.relative_length)
        kind = "right" if group.is_right else "cut" if is_cut and place < LAST_BIN - 1 else "wrong"
        added = {
            name: _added(getattr(self, name), [(place, 1.0)] if name == kind else [], 1 / GROUPS_REMEMBERED)
            for name in ("right", "wrong", "cut")
        }
        return GroupLosses(**added)

    def _expected(self) -> list[float] | None:
        """Return the groups with a right answer as if none had been cut; ``None`` while too few are known."""
        if sum(self.right) < MIN_RIGHT_GROUPS:
            return None
        expected, each = [0.0] * (LAST_BIN + 1), 1.0
        seen, cut_beyond = sum(self.right) + sum(self.wrong), sum(self.cut)
        mean_right = sum(self.right) / seen
        for number, (right, wrong, cut) in enumerate(zip(self.right, self.wrong, self.cut, strict=True)):
            expected[number] += each * right
            # Rounding must not make these negative.
            seen, cut_beyond = max(0.0, seen - right - wrong), max(0.0, cut_beyond - cut)
            unseen = 1.0 if seen < SEEN else 0.0
            more = each * cut / (seen + cut_beyond + unseen)
            expected[min(number + TWICE, LAST_BIN)] += more * unseen * mean_right
            each += more
        return expected


def _check_histogram(name: str, value: Any) -> None:
    weights = np.array(value)
    are_numbers = weights.shape == (LAST_BIN + 1,) and weights.dtype.kind in "if"
    if not are_numbers or not ((weights >= 0) & (weights <= LARGEST)).all():
        raise ValueError(f"{name} must be {LAST_BIN + 1} numbers in [0, {LARGEST:g}]")


def _added(histogram: Histogram, answers: Iterable[tuple[int, float]], fade: float) -> Histogram:
    weights = [max(0.0, 1 - fade) * weight for weight in histogram]
    for number, weight in answers:
        weights[number] += weight
    return tuple(weights)


def _bin(relative_length: float) -> int:
    # The margin keeps an answer at the upper end of a bin in it, whatever the logarithm is rounded to.
    return 0 if relative_length <= 1 else min(ceil(log(relative_length) / log(RATIO_STEP) - ROUNDING), LAST_BIN)


def _nearest_edge(relative_length: float) -> int:
    """Return the bin whose upper end is nearest: what was cut there is longer than that, but for rounding."""
    return 0 if relative_length <= 1 else min(round(log(relative_length) / log(RATIO_STEP)), LAST_BIN - 1)
