"""Ratios to estimated means have the distribution of those to the true ones, as the module's table says."""

from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from darts_server.policy.lengths.estimate import Observation
from darts_server.policy.lengths.profile import LengthProfile
from darts_server.policy.lengths.ratios import ratios_to_mean
from darts_server.policy.lengths.stats import PromptStats, update_stats

Floats = NDArray[np.float64]
CANDIDATES = 14_000
"""Of all groups together: enough to fill the profile's memory three times."""


def draw(world: str, rng: np.random.Generator, count: int) -> Floats:
    """Lengths with a mean of 1."""
    if world == "exponential":
        return rng.exponential(1, count)
    sigma = float(world.removeprefix("log-normal "))
    return rng.lognormal(-(sigma**2) / 2, sigma, count)


def observe(lengths: Floats, drawn: bool, rng: np.random.Generator) -> list[Observation]:
    """All candidates; or the 7 shortest and one that is sampled, while the others are stopped."""
    tokens = np.maximum(np.round(lengths), 1).astype(int).tolist()
    if not drawn:
        return [Observation(t) for t in tokens]
    order = np.argsort(tokens, kind="stable").tolist()
    bar, sampled = tokens[order[6]], int(rng.choice(order[7:]))
    finishes = {*order[:7], sampled}
    return [Observation(t) if i in finishes else Observation(bar, True) for i, t in enumerate(tokens)]


def errors(world: str, drawn: bool, groups: int, corrected: bool = True) -> list[float]:
    """Per cent by which mean, 90th and 99th percentile of the profile are off, from so many groups of each prompt."""
    rng, profile = np.random.default_rng(1), LengthProfile()
    count = 12 if drawn else 8
    for _ in range(CANDIDATES // (groups * count)):
        mean, stats = float(rng.lognormal(6.5, 0.6)), cast(PromptStats | None, None)
        for _ in range(groups):
            observed = observe(mean * draw(world, rng, count), drawn, rng)
            earlier, stats = stats, update_stats(stats, observed, 0)
            fully = [(o.tokens / stats.mean_ema, o.censored) for o in observed]
            profile.observe(ratios_to_mean(observed, earlier) if corrected else fully)
    found, truth = profile.quantiles(4000), draw(world, np.random.default_rng(9), 400_000)
    assert found is not None
    pairs = [(f(found), f(truth)) for f in (np.mean, lambda x: np.quantile(x, 0.9), lambda x: np.quantile(x, 0.99))]
    return [100 * float(one / other - 1) for one, other in pairs]


WORLDS = ("log-normal 0.5", "log-normal 0.8", "exponential")


@pytest.mark.untraced
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("groups", [1, 6])
def test_without_stopping_mean_and_tail_are_right_although_the_means_are_estimated(world: str, groups: int) -> None:
    mean, high, highest = errors(world, drawn=False, groups=groups)
    assert abs(mean) < 3
    assert abs(high) < 4
    fully = errors(world, drawn=False, groups=groups, corrected=False)
    assert fully[2] < highest < 4, "a mean that counts the candidate fully hides the tail"
    assert highest > 0.75 * fully[2]


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("world", "groups", "expected", "fully"),
    [
        ("log-normal 0.5", 1, [1, -5, -25], [-3, -11, -30]),
        ("log-normal 0.5", 6, [3, 4, -2], [0, -2, -12]),
        ("log-normal 0.8", 1, [-2, -9, -45], [-5, -14, -48]),
        ("log-normal 0.8", 6, [7, 11, -7], [0, -1, -22]),
        ("exponential", 1, [-4, -14, -39], [-6, -18, -42]),
        ("exponential", 6, [7, 7, 3], [0, -4, -14]),
    ],
)
def test_where_most_are_stopped_the_errors_are_those_of_the_table(
    world: str, groups: int, expected: list[float], fully: list[float]
) -> None:
    assert errors(world, drawn=True, groups=groups) == pytest.approx(expected, abs=1.5)
    assert errors(world, drawn=True, groups=groups, corrected=False) == pytest.approx(fully, abs=1.5)


def values(observed: list[Observation], earlier: PromptStats | None) -> list[float]:
    return [ratio for ratio, _ in ratios_to_mean(observed, earlier)]


def test_the_ratio_by_hand() -> None:
    group = [Observation(10), Observation(20), Observation(30)]
    # Others of the first: two with a mean of 25. The variation is 10 / 20.
    expected = [2.5 * x / (60 - x + x / 2) / (1 + 0.25 / 4) for x in (10, 20, 30)]
    assert values(group, None) == pytest.approx(expected)
    earlier = PromptStats(std_ema=10.0, mean_ema=20.0, groups=1, candidates=8, weight_version=None)
    expected = [8.5 * x / (160 + x / 2) / (1 + 0.25 / 16) for x in (10, 20, 30)]
    assert values(group, earlier) == pytest.approx(expected)


def test_a_stopped_candidate_adds_to_the_tokens_of_the_mean_and_not_to_its_candidates() -> None:
    group = [Observation(20), Observation(20), Observation(20, censored=True)]
    *_, (stopped, censored) = ratios_to_mean(group, None)
    (finished, _), *_ = ratios_to_mean(group, None)
    assert censored
    assert stopped > finished
    earlier = PromptStats(std_ema=None, mean_ema=20.0, groups=1, candidates=9, weight_version=None)
    assert values(group, earlier)[0] == pytest.approx(1.0)


def test_a_single_candidate_has_no_others_to_be_compared_with() -> None:
    assert ratios_to_mean([Observation(20)], None) == []
    earlier = PromptStats(std_ema=None, mean_ema=40.0, groups=1, candidates=1, weight_version=None)
    assert values([Observation(20)], earlier) == pytest.approx([1.5 * 20 / 50])
    assert len(values([Observation(0), Observation(20)], earlier)) == 1


def test_groups_without_an_end_have_ratios_too() -> None:
    group = [Observation(20, censored=True), Observation(30, censored=True)]
    assert all(ratio > 0 and censored for ratio, censored in ratios_to_mean(group, None))


@pytest.mark.parametrize("groups", [1, 2, 5, 40])
def test_the_candidates_of_a_mean_are_those_of_its_groups_by_their_weights(groups: int) -> None:
    weights = [0.7 ** (groups - 1), *(0.3 * 0.7 ** (groups - 1 - k) for k in range(1, groups))]
    stats = PromptStats(std_ema=None, mean_ema=1.0, groups=groups, candidates=12 * groups, weight_version=None)
    assert sum(weights) == pytest.approx(1)
    assert stats.candidates_of_mean == pytest.approx(12 / sum(weight**2 for weight in weights))
