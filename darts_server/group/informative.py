"""Selection by rewards: groups that carry the signal of more candidates than they return.

A sample whose probabilities are proportional to the size of the advantage, weighted with 1 / (probability to be
sampled), estimates GRPO's gradient of all candidates without bias (Horvitz and Thompson, 1952).

This module computes with whole numbers, so that equal rewards have advantages of exactly 0, and every sample has
exactly the requested size.
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

This bounds the weights, which trainers also apply to other terms of their loss than the gradient, and does not change
groups of right and wrong answers.
"""


class Select(StrEnum):
    INFORMATIVE = "informative"
    """At random, with probabilities proportional to the size of the advantages. Unbiased."""
    MAX_VARIANCE = "max_variance"
    """The subset whose rewards have the largest variance (PODS). Biased."""


# --- advantages ---------------------------------------------------------------


def exact_deviations(rewards: Sequence[float]) -> tuple[list[int], int]:
    """Return whole numbers and a unit: each reward minus the mean reward is exactly the number divided by the unit."""
    fractions = [reward.as_integer_ratio() for reward in rewards]
    # The denominators of floats are powers of two, so the largest is a multiple of all.
    common_denominator = max((denominator for _, denominator in fractions), default=1)
    numerators = [numerator * (common_denominator // denominator) for numerator, denominator in fractions]

    # Multiplied by the number of rewards, the mean is a whole number too.
    total = sum(numerators)
    deviations = [len(rewards) * numerator - total for numerator in numerators]
    return deviations, common_denominator * max(len(rewards), 1)


def compute_advantages(rewards: Sequence[float | None], *, by_std: bool = False) -> list[float]:
    """Return each reward minus the mean reward, and 0 without a reward.

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
    next_value = iter(values)
    return [0.0 if reward is None else next(next_value) for reward in rewards]


def have_equal_rewards(rewards: Sequence[float]) -> bool | None:
    """Whether all rewards are equal, so that GRPO learns nothing from them. None without rewards."""
    if not rewards:
        return None
    return len(set(rewards)) == 1


# --- unequal probability sampling ---------------------------------------------


def inclusion_shares(sizes: Sequence[int], places: int) -> tuple[list[int], int]:
    """Return whole numbers and a unit: each probability to be sampled is exactly the number divided by the unit.

    The probabilities are proportional to ``sizes``, but at most 1 and at least ``places / (FLOOR * len(sizes))``. Their
    sum is ``places``, at most the number of sizes.
    """
    max_share = FLOOR * max(len(sizes), 1)
    min_share = places
    clipped_shares: dict[int, int] = {}
    while True:
        free = [index for index in range(len(sizes)) if index not in clipped_shares]
        free_budget = places * max_share - sum(clipped_shares.values())
        free_size = sum(sizes[index] for index in free)
        # The share of a free candidate is size * free_budget / free_size. These are its distances beyond the limits,
        # times free_size.
        above = {index: sizes[index] * free_budget - max_share * free_size for index in free}
        below = {index: min_share * free_size - sizes[index] * free_budget for index in free}
        excess = sum(max(distance, 0) for distance in above.values())
        deficit = sum(max(distance, 0) for distance in below.values())
        if not excess and not deficit:
            break
        # If the excess is larger, clipping leaves more for free candidates, so candidates above the limit stay above.
        # If the deficit is larger, clipping leaves less.
        if excess >= deficit:
            clipped_shares.update((index, max_share) for index in free if above[index] > 0)
        if deficit >= excess:
            clipped_shares.update((index, min_share) for index in free if below[index] > 0)

    if not free_size:
        # Free candidates of size 0 share the budget evenly.
        sizes = [1] * len(sizes)
        free_size = max(len(free), 1)
    # All shares times free_size, so that they are whole numbers.
    shares = [size * free_budget for size in sizes]
    for index, share in clipped_shares.items():
        shares[index] = share * free_size
    return shares, max_share * free_size


def sample_systematically(shares: Sequence[int], unit: int, start: float) -> list[int]:
    """Return the sampled indices: systematic sampling with unequal probabilities (Madow, 1949, "On the theory of
    systematic sampling, II").

    If ``start`` is uniform in [0, 1), each index is sampled with exactly its probability ``share / unit``. The sample's
    size is the sum of the probabilities, a whole number.
    """
    # The probabilities are laid end to end. An index is sampled if its part of the line has a point start + n. All
    # lengths are multiplied by unit * denominator, so that they are whole numbers.
    numerator, denominator = start.as_integer_ratio()
    next_point = numerator * unit
    end_of_part = 0
    sampled = []
    for index, share in enumerate(shares):
        end_of_part += share * denominator
        # A share is at most a unit, so a part has at most a single point.
        if next_point < end_of_part:
            sampled.append(index)
            next_point += unit * denominator
    return sampled


def max_variance_subset(deviations: Sequence[int], places: int) -> list[int]:
    """Return the ``places`` indices whose values have the largest variance (PODS, arXiv 2504.13818, section 3).

    ``deviations``: values in ascending order.
    """

    # The subset has the lowest and the highest values. Among equal variances, the most even split is chosen.
    def variance_and_evenness(num_lowest: int) -> tuple[int, int]:
        chosen = [*deviations[:num_lowest], *deviations[len(deviations) - places + num_lowest :]]
        scaled_variance = places * sum(value**2 for value in chosen) - sum(chosen) ** 2
        return scaled_variance, -abs(2 * num_lowest - places)

    num_lowest = max(range(places + 1), key=variance_and_evenness)
    return [*range(num_lowest), *range(len(deviations) - places + num_lowest, len(deviations))]


# --- the rule -------------------------------------------------------------------


class InformativeSelector(Selector):
    def select(self) -> dict[int, SelectedAs]:
        assert isinstance(self.rule, Informative)
        rewarded, unrewarded = split_by_reward(list(self.candidates.values()))
        deviations = reward_deviations(rewarded)
        places = min(self.rule.size, len(rewarded))
        if self.rule.select is Select.MAX_VARIANCE:
            chosen = max_variance_subset(deviations, places)
        else:
            sizes = [abs(deviation) for deviation in deviations]
            shares, unit = inclusion_shares(sizes, places)
            chosen = sample_systematically(shares, unit, self.sampling_start)
        selection = {rewarded[place].index: SelectedAs.REWARD for place in chosen}

        # Candidates without a reward fill up in a random order.
        unrewarded.sort(key=lambda candidate: candidate.tail_draw)
        for candidate in unrewarded[: self.rule.size - places]:
            selection[candidate.index] = SelectedAs.FILL
        return selection


def split_by_reward(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the finished candidates with a reward, by reward and then by tail draw, and the candidates without."""
    rewarded = [c for c in candidates if c.reward is not None]
    rewarded.sort(key=lambda c: (c.reward or 0.0, c.tail_draw, c.index))
    unrewarded = [c for c in candidates if c.reward is None and c.finish_reason is not None]
    return rewarded, unrewarded


def reward_deviations(rewarded: Sequence[Candidate]) -> list[int]:
    deviations, _ = exact_deviations([candidate.reward or 0.0 for candidate in rewarded])
    return deviations


@dataclass(frozen=True, slots=True)
class Informative(SelectionRule):
    """Select ``size`` candidates by their rewards, after all candidates have ended. An extension of ours.

    Advantages above 0 and below 0 have equal sums. So if answers are right or wrong, half of the sample is right (give
    or take one if ``size`` is odd), unless there are fewer of a kind: then all of that kind are selected.

    All random numbers were drawn before any candidate ran. Candidates without a reward are returned only if too few
    others have rewards.

    ``by_std``: see `compute_advantages`.
    """

    select: Select = Select.INFORMATIVE
    by_std: bool = False
    selector_type = InformativeSelector
    needs_rewards: ClassVar[bool] = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        if self.select is Select.MAX_VARIANCE:
            # `super()` does not find the class that a dataclass with slots becomes.
            return SelectionRule.weights(self, candidates)
        rewarded, unrewarded = split_by_reward(candidates)
        sizes = [abs(deviation) for deviation in reward_deviations(rewarded)]
        shares, unit = inclusion_shares(sizes, min(self.size, len(rewarded)))
        weights = {c.index: unit / share for c, share in zip(rewarded, shares, strict=True) if c.selected_as}
        # Candidates that fill up were drawn uniformly.
        fill = [c.index for c in unrewarded if c.selected_as]
        return weights | dict.fromkeys(fill, len(unrewarded) / max(len(fill), 1))

    def advantages(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        counted = candidates
        if self.select is Select.MAX_VARIANCE:
            # As in PODS.
            counted = [candidate for candidate in candidates if candidate.selected_as]
        values = compute_advantages([candidate.reward for candidate in counted], by_std=self.by_std)
        return {c.index: value for c, value in zip(counted, values, strict=True) if c.selected_as}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.NOT_SAMPLED
