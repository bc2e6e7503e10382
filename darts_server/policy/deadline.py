"""The deadline of a cohort: up to which length its groups wait for their tails. An extension of ours.

It is a quantile, over the groups of the cohort, of their completion lengths: as a rule the length of a group's M-th
shortest trajectory, when it could be complete without its tail. So most groups lose nothing they need by waiting no
longer. Groups that come one at a time use the completion lengths of the groups before them.

Reported rewards show how many right answers deadlines take away. If these are too many, deadlines are stretched: they
become later by a factor.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, log
from typing import Any

import numpy as np

from darts_server.policy.checks import LARGEST, check_count, check_number
from darts_server.types import MaxLost

QUANTILE = 0.9
EXPLORATION = 0.05
ROUNDING = 1e-9
"""Taken off a rank before rounding up: in floating point 0.55 * 100 is 55 and a little."""
BOUND = 2.0
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

    ``quantile``: of the groups' completion lengths, in (0, 1]. ``floor``, ``ceiling``: bounds on the cohort's deadline
    in tokens; a group whose own M-th shortest is longer still waits for that. ``exploration``: share of cohorts whose
    tails run past the deadline, to see what it takes away. ``max_lost``: what that may be. ``stretch``: factor on the
    deadline, at least 1. ``bound``: how many times as long as the deadline a trajectory may become, at least 1.
    ``tokens``: the deadline itself, before it is stretched, where it does not depend on the lengths of its cohort.
    ``recent``: the one of earlier groups, before it is stretched, for a cohort in which too few determine their own.
    """

    quantile: float = QUANTILE
    floor: int = 1
    ceiling: int | None = None
    exploration: float = EXPLORATION
    max_lost: MaxLost = field(default_factory=MaxLost)
    stretch: float = 1.0
    bound: float = BOUND
    tokens: int | None = None
    recent: int | None = None

    @property
    def fixed(self) -> int | None:
        """The deadline in tokens where it is known from the start."""
        return None if self.tokens is None else self.clip(ceil(self.stretch * self.tokens))

    def from_lengths(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Compute the deadline in tokens from the lengths known so far of a cohort of ``groups``.

        Lengths that are not known yet count as longer than all known ones, so more of them cannot change the result.
        ``None`` while too few are known.
        """
        tokens = self.quantile_of(completion_lengths, groups)
        return None if tokens is None else self.clip(ceil(self.stretch * tokens))

    def quantile_of(self, completion_lengths: Iterable[int], groups: int) -> int | None:
        """Return the quantile that the deadline is, before it is stretched; see `from_lengths`."""
        rank = ceil(self.quantile * groups - ROUNDING)
        known = sorted(completion_lengths)
        return known[rank - 1] if 0 < rank <= len(known) else None

    def of_cohort(self, completion_lengths: Collection[int], minimums: Collection[int | None]) -> int | None:
        """Compute the deadline in tokens of a cohort, or ``None`` while it is not known.

        ``completion_lengths``: those that are known. ``minimums``: for each of the other groups the length that it has
        at least, or ``None`` if it can have none any more.

        A group that could only be complete beyond the bound will be cut there, so it counts as one without a completion
        length, as soon as nothing that runs in it is shorter. So the deadline becomes known although some groups, or
        with a deadline of earlier groups most of them, wait for runaways.
        """
        known = self.from_lengths(completion_lengths, len(completion_lengths) + len(minimums))
        if known is not None:
            return known
        tokens = self.without_others(completion_lengths, len(minimums))
        beyond = tokens is not None and all(m is None or m > self.bound_of(tokens) for m in minimums)
        return tokens if beyond else None

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
        return self.clip(ceil(self.stretch * extension * tokens))

    def bound_of(self, tokens: int) -> int:
        """Return the length at which every candidate is cut, for a deadline of ``tokens``."""
        return ceil(self.bound * tokens - ROUNDING)

    def stretch_in(self, tokens: int) -> float:
        """Return by which factor a deadline of ``tokens``, computed by this rule, is later than without a stretch.

        That is less than ``stretch`` where `floor` holds it. Where `ceiling` does, it is taken to be there in any case.
        """
        return 1.0 if tokens == self.ceiling else max(1.0, min(self.stretch, tokens / self.floor))

    def clip(self, tokens: int) -> int:
        return max(self.floor, tokens if self.ceiling is None else min(tokens, self.ceiling))


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
        self.tokens = rule.fixed if tokens is None and rule is not None else tokens
        """The deadline in tokens; ``None`` while it is not known."""
        self.waits_beyond: int | None = None
        """Length in tokens beyond which groups that have not reported their need shall report a minimum of it."""
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


class RecentCompletionLengths:
    """Completion lengths of the last `WINDOW` groups, in tokens, for groups that come one at a time.

    0 stands for a group that was cut at the bound before it had one. Such groups count as longer than the others.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """
        Raises:
            ValueError: a length is no whole number of at least 0.
        """
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
        return replace(rule, recent=self.quantile(rule)).of_cohort(known, [None] * (len(self._lengths) - len(known)))

    def quantile(self, rule: Deadline) -> int | None:
        """Return the quantile of those that were not cut, before it is stretched; ``None`` below `MIN_GROUPS`."""
        known = self._known()
        return rule.quantile_of(known, len(known)) if len(known) >= MIN_GROUPS else None

    def _known(self) -> list[int]:
        return [tokens for tokens in self._lengths if tokens]


# --- what deadlines take away -------------------------------------------------

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


@dataclass(frozen=True, slots=True)
class DeadlineLosses:
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

    def share(self, stretch: float) -> float | None:
        """Share of right answers beyond a deadline with that stretch; ``None`` before there are `MIN_RIGHT` of them."""
        weights = self._expected()
        if weights is None:
            return None
        place = log(stretch) / log(RATIO_STEP)
        whole = floor(place)
        # Within a bin, answers are taken to be spread evenly in the logarithm of their length.
        beyond = sum(weights[whole + 1 :]) - (place - whole) * sum(weights[whole + 1 : whole + 2])
        return beyond / sum(weights)

    def stretch(self, max_share: float) -> float:
        """Return the smallest factor on the deadline, from 1 to `MAX_STRETCH`, that takes at most ``max_share``."""
        weights = self._expected()
        if weights is None:
            return 1.0
        allowed, beyond = max_share * sum(weights), weights[LAST_BIN]
        if beyond > allowed:
            return MAX_STRETCH
        for number in range(LAST_BIN - 1, 0, -1):
            weight = weights[number]
            if beyond + weight > allowed:
                return float(min(RATIO_STEP ** (number - (allowed - beyond) / weight), MAX_STRETCH))
            beyond += weight
        return 1.0

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
class GroupLosses:
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
        fade = 1 / GROUPS_REMEMBERED
        is_cut = group.cut and not group.is_right
        place = _nearest_edge(group.relative_length) if is_cut else _bin(group.relative_length)
        is_open = is_cut and place < LAST_BIN - 1
        kind = "right" if group.is_right else "cut" if is_open else "wrong"
        return GroupLosses(
            **{
                name: _added(getattr(self, name), [(place, 1.0)] if name == kind else [], fade)
                for name in ("right", "wrong", "cut")
            }
        )

    def share(self, stretch: float) -> float | None:
        """Share of the groups that lose all right answers with that stretch, at the end of whose bin the deadline lies.

        ``None`` before there are `MIN_RIGHT_GROUPS` with a right answer.
        """
        expected = self._expected()
        return None if expected is None else sum(expected[_bin(stretch) + 1 :]) / sum(expected)

    def stretch(self, max_share: float) -> float:
        """Return the smallest factor on the deadline with which at most ``max_share`` of the groups lose all.

        It is from 1 to `MAX_STRETCH`, and the end of a bin: answers to the same prompt are often equally long, so no
        part of a bin is given up.
        """
        expected = self._expected()
        if expected is None or max_share >= 1:
            return 1.0
        allowed, beyond = max_share * sum(expected), 0.0
        for number in range(LAST_BIN, 0, -1):
            beyond += expected[number]
            if beyond > allowed:
                return min(RATIO_STEP**number, MAX_STRETCH)
        return 1.0

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
