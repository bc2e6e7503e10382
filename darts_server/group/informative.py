"""Selection by rewards: groups that carry the signal of more candidates than they return.

Under GRPO a trajectory counts with its advantage, its reward minus the mean reward of the group. So a sample whose
probabilities are proportional to the size of the advantage, weighted with 1 / (probability to be sampled), estimates
the gradient of all candidates without bias (Horvitz and Thompson, 1952).

Floats are exact fractions, so this module computes with whole numbers: equal rewards have advantages of exactly 0, and
every sample has exactly the requested size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum, sqrt
from typing import ClassVar

from darts_server.group.candidate import Candidate
from darts_server.group.selection import SelectionRule, Selector
from darts_server.types import DiscardReason, SelectedAs

FLOOR = 10
"""A candidate is sampled with at least 1 / `FLOOR` of the probability that it would have if all rewards were equal.

The gradient needs no floor, because a small advantage counts little. A floor of .1 bounds the weights, which trainers
also apply to other terms of their loss, and does not change groups of right and wrong answers.
"""


class Select(StrEnum):
    """How trajectories are selected by their rewards."""

    INFORMATIVE = "informative"
    """At random, with probabilities proportional to the size of the advantages. Without bias."""
    MAX_VARIANCE = "max_variance"
    """The subset whose rewards have the largest variance (PODS). Biased."""


# --- advantages ---------------------------------------------------------------


def exact_deviations(rewards: Sequence[float]) -> tuple[list[int], int]:
    """Return whole numbers and a unit: each reward minus the mean reward is exactly the number divided by the unit."""
    fractions = [reward.as_integer_ratio() for reward in rewards]
    # The denominators of floats are powers of two, so the largest is a multiple of all.
    unit = max((denominator for _, denominator in fractions), default=1)
    numbers = [numerator * (unit // denominator) for numerator, denominator in fractions]
    total = sum(numbers)
    return [len(numbers) * number - total for number in numbers], unit * max(len(numbers), 1)


def compute_advantages(rewards: Sequence[float | None], *, by_std: bool = False) -> list[float]:
    """Return each reward minus the mean of all rewards, and 0 without a reward.

    ``by_std``: divide by the population standard deviation (GRPO, arXiv 2402.03300, section 4.1.2), unless it is 0.
    """
    deviations, unit = exact_deviations([reward for reward in rewards if reward is not None])
    values = [deviation / unit for deviation in deviations]
    largest = max(map(abs, deviations), default=0)
    if by_std and largest:
        # Relative to the largest, squares neither overflow nor vanish.
        relative = [deviation / largest for deviation in deviations]
        std = sqrt(fsum(value**2 for value in relative) / len(relative))
        values = [value / std for value in relative]
    # Rewards that are None have no value.
    advantages = []
    remaining = iter(values)
    for reward in rewards:
        advantages.append(0.0 if reward is None else next(remaining))
    return advantages


def have_equal_rewards(rewards: Sequence[float]) -> bool | None:
    """Whether all rewards are equal, so that GRPO learns nothing from them. None without rewards."""
    return len(set(rewards)) == 1 if rewards else None


# --- unequal probability sampling ---------------------------------------------


def inclusion_shares(sizes: Sequence[int], places: int) -> tuple[list[int], int]:
    """Return whole numbers and a unit: each probability to be sampled is exactly the number divided by the unit.

    The probabilities are proportional to ``sizes``, but at most 1 and at least ``places / (FLOOR * len(sizes))``. Their
    sum is ``places``. If all sizes that are not limited are 0, they share the rest evenly.

    ``places``: at most the number of sizes.
    """
    # The probabilities of candidates at a limit, in units of 1 / whole: the limits are ``least`` and ``whole``.
    whole = FLOOR * max(len(sizes), 1)
    least = places
    limited: dict[int, int] = {}
    while True:
        free = [index for index in range(len(sizes)) if index not in limited]
        budget = places * whole - sum(limited.values())
        total = sum(sizes[index] for index in free)
        # The probability of a free candidate is size * budget / total. These are its distances beyond the limits.
        above = {index: sizes[index] * budget - total * whole for index in free}
        below = {index: total * least - sizes[index] * budget for index in free}
        excess = sum(max(distance, 0) for distance in above.values())
        deficit = sum(max(distance, 0) for distance in below.values())
        if not excess and not deficit:
            break
        # If the excess is larger, the limits take more from the sum than they add. Then the free probabilities grow,
        # and candidates above 1 stay above 1. If the deficit is larger, the free probabilities shrink.
        if excess >= deficit:
            limited.update((index, whole) for index in free if above[index] > 0)
        if deficit >= excess:
            limited.update((index, least) for index in free if below[index] > 0)

    if not total:
        # All free sizes are 0.
        sizes = [1] * len(sizes)
        total = max(len(free), 1)
    shares = [size * budget for size in sizes]
    for index, limit in limited.items():
        shares[index] = limit * total
    return shares, whole * total


def sample_systematically(shares: Sequence[int], unit: int, start: float) -> list[int]:
    """Return the sampled indices: systematic sampling with unequal probabilities (Madow, 1949, "On the theory of
    systematic sampling, II").

    The probabilities ``share / unit`` are laid end to end. An index is sampled if its part of the line has one of the
    points start, start + 1, start + 2 and so on. If the start is uniform in [0, 1), each index is sampled with exactly
    its probability. The sample has exactly as many indices as the sum of the probabilities, a whole number.
    """
    numerator, denominator = start.as_integer_ratio()
    step = unit * denominator
    point = numerator * unit
    end = 0
    sampled = []
    for index, share in enumerate(shares):
        end += share * denominator
        # A share is at most a unit, so an index has at most one of the points.
        if point < end:
            sampled.append(index)
            point += step
    return sampled


def max_variance_subset(deviations: Sequence[int], places: int) -> list[int]:
    """Return the ``places`` indices whose values have the largest variance (PODS, arXiv 2504.13818, section 3).

    They are the first and the last indices. Of several subsets, the most even is returned.

    ``deviations``: values in ascending order.
    """

    def spread(first: int) -> tuple[int, int]:
        chosen = [*deviations[:first], *deviations[len(deviations) - places + first :]]
        variance = places * sum(value**2 for value in chosen) - sum(chosen) ** 2
        return variance, -abs(2 * first - places)

    first = max(range(places + 1), key=spread)
    return [*range(first), *range(len(deviations) - places + first, len(deviations))]


# --- the rule -------------------------------------------------------------------


class InformativeSelector(Selector):
    """Selects by rewards when all candidates have ended, and stops, cuts and delivers nothing before."""

    def select(self) -> dict[int, SelectedAs]:
        assert isinstance(self.rule, Informative)
        rewarded, unrewarded = split_by_reward(list(self.candidates.values()))
        deviations = deviations_of(rewarded)
        places = min(self.rule.size, len(rewarded))
        if self.rule.select is Select.MAX_VARIANCE:
            chosen = max_variance_subset(deviations, places)
        else:
            sizes = [abs(deviation) for deviation in deviations]
            shares, unit = inclusion_shares(sizes, places)
            chosen = sample_systematically(shares, unit, self.start)
        selection = {rewarded[place].index: SelectedAs.REWARD for place in chosen}
        # Candidates without a reward fill the places that are left, in a random order.
        fill = sorted(unrewarded, key=lambda candidate: candidate.tail_draw)
        selection.update((candidate.index, SelectedAs.FILL) for candidate in fill[: self.rule.size - places])
        return selection


def split_by_reward(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the finished candidates with a reward, by reward and then by tail draw, and the candidates without."""
    rewarded = [c for c in candidates if c.reward is not None]
    rewarded.sort(key=lambda c: (c.reward or 0.0, c.tail_draw, c.index))
    unrewarded = [c for c in candidates if c.reward is None and c.finish_reason is not None]
    return rewarded, unrewarded


def deviations_of(rewarded: Sequence[Candidate]) -> list[int]:
    """Return the numbers of `exact_deviations`."""
    return exact_deviations([candidate.reward or 0.0 for candidate in rewarded])[0]


@dataclass(frozen=True, slots=True)
class Informative(SelectionRule):
    """Select ``size`` candidates by their rewards, after all candidates have ended. An extension of ours.

    The candidates are sampled systematically, in the order of their rewards and with probabilities proportional to the
    size of their advantages. Advantages above 0 and below 0 have equal sums, so of right and wrong answers half are
    right and half are wrong (one more or less if ``size`` is odd), unless there are fewer of a kind: then all of that
    kind are selected.

    All random numbers were drawn before any candidate ran. Candidates without a reward have no advantage. They are
    returned only if too few others have rewards.

    ``by_std``: see `compute_advantages`.
    """

    select: Select = Select.INFORMATIVE
    by_std: bool = False
    selector_type = InformativeSelector
    needs_rewards: ClassVar[bool] = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        """Return 1 / (probability to be sampled, given all rewards) of each selected candidate, by index.

        Weights stand for the candidates with rewards. The weights of candidates that fill up stand for the candidates
        without rewards.
        """
        if self.select is Select.MAX_VARIANCE:
            # `super()` does not find the class that a dataclass with slots becomes.
            return SelectionRule.weights(self, candidates)
        rewarded, unrewarded = split_by_reward(candidates)
        sizes = [abs(deviation) for deviation in deviations_of(rewarded)]
        shares, unit = inclusion_shares(sizes, min(self.size, len(rewarded)))
        weights = {c.index: unit / share for c, share in zip(rewarded, shares, strict=True) if c.selected_as}
        fill = [c.index for c in unrewarded if c.selected_as]
        return weights | dict.fromkeys(fill, len(unrewarded) / max(len(fill), 1))

    def advantages(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        """Return the advantages of selected candidates: over all candidates with rewards, or under `max_variance` over
        the selected candidates, as in PODS.
        """
        counted = candidates
        if self.select is Select.MAX_VARIANCE:
            counted = [candidate for candidate in candidates if candidate.selected_as]
        values = compute_advantages([candidate.reward for candidate in counted], by_std=self.by_std)
        return {c.index: value for c, value in zip(counted, values, strict=True) if c.selected_as}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.NOT_SAMPLED
