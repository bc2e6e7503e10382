"""Sampling by rewards: exact probabilities, exact sizes, and no bias against plain GRPO."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, pairwise, permutations
from math import comb, fsum, sqrt
from random import Random
from statistics import fmean, pstdev, pvariance

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from darts_server.group.candidate import Candidate, State
from darts_server.group.informative import (
    FLOOR,
    Informative,
    Select,
    compute_advantages,
    exact_deviations,
    have_equal_rewards,
    inclusion_shares,
    max_variance_subset,
    sample_systematically,
    split_by_reward,
)
from darts_server.types import FinishReason, SelectedAs

REWARDS = st.sampled_from([0.0, 1.0, -0.5, 0.1, 0.3, 1e-300, 1e300, -1e300]) | st.floats(-10, 10)
SIZES = st.lists(st.integers(0, 50) | st.just(0) | st.integers(0, 10**40), min_size=1, max_size=12)


def sizes_of(rewards: Sequence[float]) -> list[int]:
    return list(map(abs, exact_deviations(rewards)[0]))


# --- advantages ---------------------------------------------------------------


def test_advantages_are_rewards_minus_their_mean_and_0_without_a_reward() -> None:
    assert compute_advantages([1.0, None, 0.0, 0.0, 0.0]) == [0.75, 0.0, -0.25, -0.25, -0.25]
    assert compute_advantages([None, None]) == [0.0, 0.0]
    assert compute_advantages([]) == []


def test_advantages_of_equal_rewards_are_exactly_0() -> None:
    assert fmean([0.1] * 3) != 0.1 or sum([0.1] * 3) / 3 != 0.1, "floats alone would not be exact"
    for by_std in (False, True):
        assert compute_advantages([0.1] * 3, by_std=by_std) == [0.0] * 3


def test_rewards_that_differ_by_one_float_have_advantages() -> None:
    rewards = [0.1, 0.1, np.nextafter(0.1, 1).item()]
    assert have_equal_rewards(rewards) is False
    assert compute_advantages(rewards, by_std=True) == pytest.approx([-sqrt(0.5), -sqrt(0.5), sqrt(2)], abs=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_advantages_by_the_standard_deviation_are_those_of_grpo(rewards: list[float]) -> None:
    values = compute_advantages(rewards, by_std=True)
    std = pstdev(map(Fraction, rewards))
    if std > 1e-100:
        assert values == pytest.approx([(r - fmean(rewards)) / std for r in rewards], abs=1e-6)
    assert fsum(values) == pytest.approx(0, abs=1e-9)


def test_the_largest_and_the_smallest_rewards_neither_overflow_nor_vanish() -> None:
    for size in (1e300, 1e-300):
        assert compute_advantages([size, -size], by_std=True) == [1.0, -1.0]
        assert compute_advantages([size, -size]) == [size, -size]


def test_rewards_are_equal_only_if_there_are_some() -> None:
    assert [have_equal_rewards(rewards) for rewards in ([], [2.0], [2.0, 2.0], [0.0, -0.0], [1.0, 0.0])] == [
        None,
        True,
        True,
        True,
        False,
    ]


# --- inclusion probabilities --------------------------------------------------


@given(SIZES, st.integers(0, 12))
def test_probabilities_are_proportional_within_their_limits_and_sum_to_the_size(sizes: list[int], places: int) -> None:
    places = min(places, len(sizes))
    shares, unit = inclusion_shares(sizes, places)
    probabilities = [Fraction(share, unit) for share in shares]
    least = Fraction(places, FLOOR * len(sizes))
    assert sum(probabilities) == places
    assert all(least <= probability <= 1 for probability in probabilities)
    free = [i for i, p in enumerate(probabilities) if least < p < 1]
    for i, j in pairwise(free):
        assert probabilities[i] * sizes[j] == probabilities[j] * sizes[i] or sizes[i] == sizes[j] == 0
    for i, j in permutations(range(len(sizes)), 2):
        assert sizes[i] > sizes[j] or probabilities[i] <= probabilities[j]
    # A limit applies only where the proportional probability is beyond it.
    for i in free:
        for j, probability in enumerate(probabilities):
            if sizes[i]:
                proportional = probabilities[i] * Fraction(sizes[j], sizes[i])
                assert probability == min(1, max(least, proportional))
    event("capped" if 1 in probabilities else "not capped")
    event("floored" if least in probabilities else "not floored")


@pytest.mark.parametrize(
    ("sizes", "places", "expected"),
    [
        ([0, 0, 0, 0], 2, ["1/2", "1/2", "1/2", "1/2"]),
        ([10, 0, 0, 0], 2, ["1", "1/3", "1/3", "1/3"]),
        ([10, 1, 0, 0], 2, ["1", "9/10", "1/20", "1/20"]),
        ([5, 5, 0, 0], 2, ["19/20", "19/20", "1/20", "1/20"]),
        ([3, 1], 2, ["1", "1"]),
        ([3, 1], 0, ["0", "0"]),
        ([], 0, []),
        # One candidate above 1, and ten below the floor by exactly as much together.
        ([120, *[2] * 10, *[0] * 0, 60], 4, None),
    ],
)
def test_probabilities_of_some_sizes(sizes: list[int], places: int, expected: list[str] | None) -> None:
    shares, unit = inclusion_shares(sizes, places)
    if expected is not None:
        assert [Fraction(share, unit) for share in shares] == list(map(Fraction, expected))
    assert sum(shares) == places * unit


def test_excess_and_deficit_of_the_same_size_limit_both() -> None:
    # Proportional: 2 * 11 / 20 = 1.1 for the first, and 0 for two, whose floors are .05 each.
    shares, unit = inclusion_shares([11, 9, 0, 0], 2)
    assert [Fraction(share, unit) for share in shares] == [Fraction(x) for x in ("1", "9/10", "1/20", "1/20")]


@given(st.integers(1, 40), st.data())
def test_of_right_and_wrong_answers_half_of_the_sample_is_right(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(1, count))
    wrong = data.draw(st.integers(1, count))
    places = data.draw(st.integers(1, right + wrong))
    start = data.draw(st.floats(0, 1, exclude_max=True))
    shares, unit = inclusion_shares(sizes_of([0.0] * wrong + [1.0] * right), places)
    sampled = sample_systematically(shares, unit, start)
    right_sampled = sum(index >= wrong for index in sampled)
    half = {places // 2, places - places // 2}
    if right < places / 2:
        assert right_sampled == right
    elif wrong < places / 2:
        assert right_sampled == places - wrong
    else:
        assert right_sampled in half


# --- systematic sampling ------------------------------------------------------


@given(st.lists(REWARDS, min_size=1, max_size=40), st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_a_sample_has_exactly_its_size_and_no_index_twice(rewards: list[float], places: int, start: float) -> None:
    places = min(places, len(rewards))
    sampled = sample_systematically(*inclusion_shares(sizes_of(rewards), places), start)
    assert len(sampled) == len(set(sampled)) == places
    assert sampled == sorted(sampled)


@pytest.mark.parametrize("start", [0.0, 0.25, 0.5, np.nextafter(1, 0).item(), np.nextafter(0, 1).item()])
def test_starts_at_the_boundaries_of_candidates_give_whole_samples(start: float) -> None:
    assert len(sample_systematically([1] * 8, 2, start)) == 4
    assert sample_systematically([2] * 4, 2, start) == [0, 1, 2, 3]


def starts_of(shares: Sequence[int], unit: int) -> Iterator[tuple[float, Fraction]]:
    """Yield a start in each interval in which the sample is the same, with the length of the interval."""
    ends = [Fraction(sum(shares[: i + 1]), unit) % 1 for i in range(len(shares))]
    for low, high in pairwise(sorted({Fraction(0), Fraction(1), *ends})):
        yield float((low + high) / 2), high - low


@given(st.lists(REWARDS, min_size=1, max_size=8), st.integers(1, 8))
def test_over_all_starts_each_index_is_sampled_with_exactly_its_probability(rewards: list[float], places: int) -> None:
    places = min(places, len(rewards))
    shares, unit = inclusion_shares(sizes_of(rewards), places)
    found = [Fraction(0)] * len(rewards)
    for start, length in starts_of(shares, unit):
        # Intervals below the precision of floats cannot be told apart.
        if length > Fraction(1, 2**50):
            for index in sample_systematically(shares, unit, start):
                found[index] += length
    assert [float(p) for p in found] == pytest.approx([share / unit for share in shares], abs=1e-12)


@pytest.mark.parametrize("rewards", [[1.0] * 3 + [0.0] * 13, [0.1 * i for i in range(16)], [0.0] * 15 + [5.0]])
def test_a_million_draws_have_the_inclusion_probabilities(rewards: list[float]) -> None:
    draws = 1_000_000
    places = 8
    shares, unit = inclusion_shares(sizes_of(sorted(rewards)), places)
    probabilities = np.array([share / unit for share in shares])
    starts = np.random.default_rng(3).random(draws)
    # Independent of the function: an index is sampled if the number of points up to its end has grown.
    ends = np.cumsum(probabilities)
    counts = np.diff(np.ceil(np.concatenate([[0.0], ends])[:, None] - starts[None, :]).clip(0), axis=0)
    rates = counts.mean(axis=1)
    # Systematic sampling of a probability of 1 or 0 has no deviation.
    deviations = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert np.all(np.abs(rates - probabilities) <= 4.5 * deviations + 1e-9)
    for draw in range(500):
        assert sample_systematically(shares, unit, float(starts[draw])) == np.flatnonzero(counts[:, draw]).tolist()


# --- max_variance -------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, -1.0]), min_size=1, max_size=7), st.integers(1, 7))
def test_the_subset_has_the_largest_variance_of_all_subsets(rewards: list[float], places: int) -> None:
    rewards = sorted(rewards)
    places = min(places, len(rewards))
    chosen = max_variance_subset(exact_deviations(rewards)[0], places)
    assert len(set(chosen)) == places
    best = max(pvariance(map(Fraction, subset)) for subset in combinations(rewards, places))
    assert pvariance([Fraction(rewards[index]) for index in chosen]) == best


def test_of_subsets_with_the_same_variance_the_most_even_is_chosen() -> None:
    assert max_variance_subset([0] * 6, 2) == [0, 5]
    assert max_variance_subset([0, 0, 0, 4, 4, 4], 4) == [0, 1, 4, 5]


# --- the gradient, in worlds that are small enough to try everything -----------


def candidates_of(rewards: Sequence[float | None], draws: Sequence[float]) -> list[Candidate]:
    return [
        Candidate(i, draws[i], State.FINISHED, 5, FinishReason.STOP, has_verdict=True, reward=reward)
        for i, reward in enumerate(rewards)
    ]


def select(rule: Informative, rewards: Sequence[float | None], draws: Sequence[float], start: float) -> list[Candidate]:
    """Return the candidates after the selection."""
    candidates = candidates_of(rewards, draws)
    selector = rule.selector_type(rule, deliver_early=False)
    selector.sampling_start = start
    for candidate in candidates:
        selector.update(candidate)
    for index, selected_as in selector.select().items():
        candidates[index].select(selected_as)
    return candidates


def expected_sum(rule: Informative, rewards: Sequence[float | None], gradients: Sequence[float]) -> float:
    """Return the expectation of weight * advantage * gradient, summed over returned trajectories, over all draws."""
    orders = list(permutations([i / 10 for i in range(len(rewards))]))
    sums = []
    for draws in orders:
        ordered, _ = split_by_reward(candidates_of(rewards, draws))
        places = min(rule.size, len(ordered))
        shares, unit = inclusion_shares(sizes_of([c.reward or 0.0 for c in ordered]), places)
        for start, length in starts_of(shares, unit) if ordered else [(0.5, Fraction(1))]:
            candidates = select(rule, rewards, draws, start)
            advantages = rule.advantages(candidates)
            weights = rule.weights(candidates) or dict.fromkeys(advantages, 1.0)
            assert len(advantages) == rule.size
            sums.append(float(length) * fsum(weights[i] * advantages[i] * gradients[i] for i in advantages))
    return fsum(sums) / len(orders)


@pytest.mark.untraced
@pytest.mark.parametrize(("kinds", "count"), [((0.0, 1.0), 5), ((0.0, 0.25, 1.0), 4), ((0.0, 1.0, None), 4)])
@pytest.mark.parametrize("by_std", [False, True])
def test_the_expected_weighted_gradient_is_that_of_all_candidates(
    kinds: Sequence[float | None], count: int, by_std: bool
) -> None:
    random = Random(1)
    for size in range(1, count + 1):
        rule = Informative(size, by_std=by_std)
        for rewards in combinations_with_replacement(kinds, count):
            gradients = [random.gauss(0, 1) for _ in rewards]
            plain = fsum(a * g for a, g in zip(compute_advantages(rewards, by_std=by_std), gradients, strict=True))
            assert expected_sum(rule, rewards, gradients) == pytest.approx(plain, abs=1e-9)


def true_gradient(estimate: Callable[[Sequence[float], Sequence[float]], float | None], p: float, count: int) -> float:
    """Return the expectation of an estimate of the gradient over all outcomes that give one.

    The policy answers right with probability ``p``, the sigmoid of its only parameter. ``estimate``: gets the rewards
    and the gradients of the log-probabilities.
    """
    total = 0.0
    mass = 0.0
    for right in range(count + 1):
        rewards = [1.0] * right + [0.0] * (count - right)
        value = estimate(rewards, [1 - p] * right + [-p] * (count - right))
        if value is not None:
            probability = comb(count, right) * p**right * (1 - p) ** (count - right)
            total += probability * value
            mass += probability
    return total / mass


def plain_grpo(rewards: Sequence[float], gradients: Sequence[float]) -> float:
    return fsum(a * g for a, g in zip(compute_advantages(rewards), gradients, strict=True)) / len(rewards)


@pytest.mark.untraced
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_informative_is_unbiased_and_max_variance_and_dynamic_sampling_are_not(p: float) -> None:
    count = 6
    size = 3
    plain = true_gradient(plain_grpo, p, count)

    def informative(rewards: Sequence[float], gradients: Sequence[float]) -> float:
        return expected_sum(Informative(size), rewards, gradients) / count

    def max_variance(rewards: Sequence[float], gradients: Sequence[float]) -> float:
        return expected_sum(Informative(size, select=Select.MAX_VARIANCE), rewards, gradients) / size

    def dynamic_sampling(rewards: Sequence[float], gradients: Sequence[float]) -> float | None:
        return None if have_equal_rewards(rewards) else plain_grpo(rewards, gradients)

    assert true_gradient(informative, p, count) == pytest.approx(plain, abs=1e-9)
    assert abs(true_gradient(max_variance, p, count) / plain - 1) > 0.01
    assert abs(true_gradient(dynamic_sampling, p, count) / plain - 1) > 0.01


# --- the rule -----------------------------------------------------------------


def selected(candidates: Sequence[Candidate]) -> Mapping[int, SelectedAs]:
    return {c.index: c.selected_as for c in candidates if c.selected_as is not None}


def test_candidates_without_rewards_are_returned_only_if_too_few_others_have_rewards() -> None:
    draws = (0.5, 0.4, 0.3, 0.2, 0.1)
    rewards = [1.0, None, 0.0, None, 0.5]
    candidates = select(Informative(3), rewards, draws, 0.5)
    assert selected(candidates) == dict.fromkeys((0, 2, 4), SelectedAs.REWARD)

    candidates = select(Informative(4), rewards, draws, 0.5)
    assert selected(candidates)[3] is SelectedAs.FILL, "the lower tail draw"
    assert len(selected(candidates)) == 4
    rule = Informative(4)
    assert rule.weights(candidates) == {0: 1.0, 2: 1.0, 3: 2.0, 4: 1.0}
    assert rule.advantages(candidates) == {0: 0.5, 2: -0.5, 3: 0.0, 4: 0.0}


def test_without_any_reward_the_group_is_a_plain_sample() -> None:
    candidates = select(Informative(2), [None] * 3, (0.3, 0.1, 0.2), 0.5)
    assert selected(candidates) == dict.fromkeys((1, 2), SelectedAs.FILL)
    assert Informative(2).weights(candidates) == {1: 1.5, 2: 1.5}
    assert set(Informative(2).advantages(candidates).values()) == {0.0}


def test_a_group_of_equal_rewards_is_a_plain_sample() -> None:
    candidates = select(Informative(2), [1.0] * 4, (0.1, 0.2, 0.3, 0.4), 0.5)
    assert len(selected(candidates)) == 2
    assert Informative(2).weights(candidates) == dict.fromkeys(selected(candidates), 2.0)


def test_max_variance_has_advantages_over_the_returned_and_no_weights() -> None:
    rule = Informative(2, select=Select.MAX_VARIANCE)
    candidates = select(rule, [0.0, 0.0, 0.0, 1.0], (0.4, 0.3, 0.2, 0.1), 0.5)
    assert selected(candidates) == {2: SelectedAs.REWARD, 3: SelectedAs.REWARD}
    assert rule.weights(candidates) == {}
    assert rule.advantages(candidates) == {2: -0.5, 3: 0.5}
