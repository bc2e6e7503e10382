"""The distribution of lengths around the mean of their prompt."""

import json
import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.estimates.length_profile import EDGES, MEMORY, LengthProfile, ratios_to_mean
from darts_server.estimates.lengths import Observation, PromptStats, estimate_lengths, update_stats

Floats = NDArray[np.float64]
Drawing = Callable[[np.random.Generator, tuple[int, ...]], Floats]
Ratios = list[tuple[float, bool]]

PROMPT_MEAN = 300
POOL = 3 * MEMORY
RATIOS = st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=20)


def log_normal(sigma: float) -> Drawing:
    return lambda rng, shape: rng.lognormal(-(sigma**2) / 2, sigma, shape)


def geometric(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.geometric(1 / PROMPT_MEAN, shape) / PROMPT_MEAN


def stop_none(lengths: Floats, _: np.random.Generator) -> Ratios:
    return [(float(x), False) for x in lengths]


def shortest(lengths: Floats, _: np.random.Generator) -> Ratios:
    """The 8 shortest finish, and the others are stopped at the length of the 8th."""
    bar = float(np.sort(lengths)[7])
    return [(min(float(x), bar), bool(x > bar)) for x in lengths]


def sampled_tail(lengths: Floats, rng: np.random.Generator) -> Ratios:
    """The 7 shortest and one sampled candidate finish, and the others are stopped at the length of the 7th."""
    order = np.argsort(lengths)
    bar = float(lengths[order[6]])
    drawn = rng.choice(order[7:])
    return [(float(x), False) if x <= bar or i == drawn else (bar, True) for i, x in enumerate(lengths)]


def recorded(
    draw: Drawing, stop: Callable[[Floats, np.random.Generator], Ratios], candidates: int, groups: int | None = None
) -> LengthProfile:
    rng = np.random.default_rng(candidates)
    profile = LengthProfile()
    for lengths in draw(rng, (groups or POOL // candidates, candidates)):
        profile.observe(stop(lengths, rng))
    return profile


def quantiles(profile: LengthProfile, n: int = 2000) -> Floats:
    found = profile.quantiles(n)
    assert found is not None
    return found


# --- against known distributions --------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("draw", [log_normal(0.3), log_normal(0.5), geometric])
@pytest.mark.parametrize("stop", [stop_none, shortest, sampled_tail])
@pytest.mark.parametrize("candidates", [12, *(pytest.param(count, marks=pytest.mark.nightly) for count in (8, 16))])
def test_mean_and_tail_are_right_although_long_candidates_were_stopped(
    draw: Drawing, stop: Callable[[Floats, np.random.Generator], Ratios], candidates: int
) -> None:
    truth = draw(np.random.default_rng(99), (400_000,))
    found = quantiles(recorded(draw, stop, candidates))
    assert float(found.mean()) == pytest.approx(float(truth.mean()), rel=0.1)
    assert float(np.quantile(found, 0.9)) == pytest.approx(float(np.quantile(truth, 0.9)), rel=0.1)
    assert float(np.median(found)) == pytest.approx(float(np.median(truth)), rel=0.05)


def test_the_product_limit_rule_computed_by_hand() -> None:
    profile = LengthProfile()
    # Two of ten candidates finish at 1/4, four are stopped at 1/2, and the others finish at 1, 2, 4 and 8.
    profile.observe([(0.25, False)] * 2 + [(0.5, True)] * 4 + [(float(2**k), False) for k in range(4)])
    found = quantiles(profile, 1000)
    width = 2 ** (1 / 24)
    assert float((found < 0.25 * width).mean()) == pytest.approx(0.2, abs=0.002)
    assert float((found < 0.9).mean()) == pytest.approx(0.2, abs=0.002)
    assert float((found < 1 * width).mean()) == pytest.approx(0.2 + 0.8 / 4, abs=0.002)


def test_a_single_finished_candidate_gives_a_lower_bound_for_the_others() -> None:
    profile = LengthProfile()
    profile.observe([(1.0, False), (1.0, True), (1.0, True), (1.0, True)])
    found = quantiles(profile, 100)
    assert float(found.min()) > 0.9
    assert math.isfinite(float(found.max()))


@given(RATIOS, st.integers(1, 50))
def test_quantiles_ascend_and_are_positive_once_a_candidate_has_finished(ratios: Ratios, n: int) -> None:
    profile = LengthProfile()
    profile.observe(ratios)
    found = profile.quantiles(n)
    assert (found is None) == all(censored for _, censored in ratios)
    if found is not None:
        assert found.shape == (n,)
        assert (found >= EDGES[0]).all()
        assert (np.diff(found) >= 0).all()
        assert np.isfinite(found).all()


def test_ratios_off_the_scale_count_in_the_outermost_bins() -> None:
    profile = LengthProfile()
    profile.observe([(1e-9, False), (0.0, False), (1e9, False), (1e300, True)])
    assert (profile.state["finished"][0], profile.state["finished"][-1], profile.state["censored"][-1]) == (2, 1, 1)


# --- what is remembered -----------------------------------------------------


@pytest.mark.untraced
def test_old_ratios_fade() -> None:
    rng = np.random.default_rng(0)
    profile = LengthProfile()
    for scale in (1.0, 0.2):
        for _ in range(5 * MEMORY // 16):
            profile.observe([(float(x), False) for x in scale * rng.lognormal(-0.125, 0.5, 16)])
    assert float(quantiles(profile).mean()) == pytest.approx(0.2, rel=0.05)
    assert sum(profile.state["finished"]) == pytest.approx(MEMORY, rel=0.01)
    for _ in range(100):
        profile.observe([(1.0, True)] * MEMORY)
    assert sum(profile.state["finished"]) == 0
    assert profile.quantiles(3) is None


def ratios(observed: list[Observation], earlier: PromptStats | None = None) -> list[tuple[float, bool]]:
    return ratios_to_mean(observed, estimate_lengths(observed), earlier)


def test_candidates_without_tokens_are_ignored() -> None:
    group = [Observation(20), Observation(30), Observation(10, censored=True)]
    assert ratios([*group, *[Observation(0, censored=True)] * 50]) == ratios(group)


def test_a_group_without_candidates_changes_nothing() -> None:
    profile = LengthProfile()
    profile.observe([(1.0, False), (0.5, True)])
    before = profile.state
    profile.observe([])
    assert profile.state == before


def test_the_state_survives_json_and_continues_unchanged() -> None:
    profile = recorded(geometric, sampled_tail, 16)
    text = json.dumps(profile.state)
    assert len(text) < 20_000
    twin = LengthProfile(**json.loads(text))
    assert twin.state == profile.state
    for copy in (profile, twin):
        copy.observe([(0.7, False), (1.1, True)])
    assert twin.state == profile.state
    assert (quantiles(twin) == quantiles(profile)).all()


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_a_state_out_of_range_or_with_other_bins_is_refused(count: float) -> None:
    bins = len(EDGES) - 1
    with pytest.raises(ValueError, match="finished must be a number in"):
        LengthProfile(finished=(count,) * bins)
    with pytest.raises(ValueError, match="censored must be a number in"):
        LengthProfile(censored=(0.0,) * (bins - 1) + (count,))
    with pytest.raises(ValueError, match=r"finished must have \d+ counts, got 3"):
        LengthProfile(finished=(1.0, 2.0, 3.0))


# --- ratios ------------------------------------------------------------------


CANDIDATES = 14_000
"""Number of candidates of all groups: enough to fill the profile's memory three times."""


def draw(world: str, rng: np.random.Generator, count: int) -> Floats:
    """Return lengths with a mean of 1."""
    if world == "exponential":
        return rng.exponential(1, count)
    sigma = float(world.removeprefix("log-normal "))
    return rng.lognormal(-(sigma**2) / 2, sigma, count)


def observe(lengths: Floats, drawn: bool, rng: np.random.Generator) -> list[Observation]:
    """Return all candidates as finished, or if ``drawn`` only the 7 shortest and one sampled candidate."""
    tokens = np.maximum(np.round(lengths), 1).astype(int).tolist()
    if not drawn:
        return [Observation(t) for t in tokens]
    order = np.argsort(tokens, kind="stable").tolist()
    bar = tokens[order[6]]
    sampled = int(rng.choice(order[7:]))
    finishes = {*order[:7], sampled}
    return [Observation(t) if i in finishes else Observation(bar, True) for i, t in enumerate(tokens)]


def errors(world: str, drawn: bool, groups: int, corrected: bool = True) -> list[float]:
    """Return the errors of mean, 90th and 99th percentile in per cent, from ``groups`` groups of each prompt."""
    rng = np.random.default_rng(1)
    profile = LengthProfile()
    count = 12 if drawn else 8
    for _ in range(CANDIDATES // (groups * count)):
        mean = float(rng.lognormal(6.5, 0.6))
        stats = cast(PromptStats | None, None)
        for _ in range(groups):
            observed = observe(mean * draw(world, rng, count), drawn, rng)
            earlier = stats
            stats = update_stats(stats, observed, estimate_lengths(observed), 0)
            fully = [(o.tokens / stats.mean_ema, o.censored) for o in observed]
            profile.observe(ratios(observed, earlier) if corrected else fully)
    found = profile.quantiles(4000)
    truth = draw(world, np.random.default_rng(9), 400_000)
    assert found is not None
    pairs = [(f(found), f(truth)) for f in (np.mean, lambda x: np.quantile(x, 0.9), lambda x: np.quantile(x, 0.99))]
    return [100 * float(estimate / true - 1) for estimate, true in pairs]


@pytest.mark.untraced
@pytest.mark.parametrize(
    "world",
    ["exponential", *(pytest.param(f"log-normal {sigma}", marks=pytest.mark.nightly) for sigma in (0.5, 0.8))],
)
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
        pytest.param("log-normal 0.5", 1, [1, -5, -25], [-3, -11, -30], marks=pytest.mark.nightly),
        pytest.param("log-normal 0.5", 6, [3, 4, -2], [0, -2, -12], marks=pytest.mark.nightly),
        ("log-normal 0.8", 1, [-2, -9, -45], [-5, -14, -48]),
        ("log-normal 0.8", 6, [7, 11, -7], [0, -1, -22]),
        pytest.param("exponential", 1, [-4, -14, -39], [-6, -18, -42], marks=pytest.mark.nightly),
        pytest.param("exponential", 6, [7, 7, 3], [0, -4, -14], marks=pytest.mark.nightly),
    ],
)
def test_the_errors_with_stopped_candidates_are_in_the_table(
    world: str, groups: int, expected: list[float], fully: list[float]
) -> None:
    assert errors(world, drawn=True, groups=groups) == pytest.approx(expected, abs=1.5)
    assert errors(world, drawn=True, groups=groups, corrected=False) == pytest.approx(fully, abs=1.5)


def values(observed: list[Observation], earlier: PromptStats | None) -> list[float]:
    return [ratio for ratio, _ in ratios(observed, earlier)]


def test_ratios_computed_by_hand() -> None:
    group = [Observation(10), Observation(20), Observation(30)]
    # The first candidate has two others with a mean of 25. The variation is 10 / 20.
    expected = [2.5 * x / (60 - x + x / 2) / (1 + 0.25 / 4) for x in (10, 20, 30)]
    assert values(group, None) == pytest.approx(expected)
    earlier = PromptStats(std_ema=10.0, mean_ema=20.0, groups=1, candidates=8, weight_version=None)
    expected = [8.5 * x / (160 + x / 2) / (1 + 0.25 / 16) for x in (10, 20, 30)]
    assert values(group, earlier) == pytest.approx(expected)


def test_a_stopped_candidate_adds_tokens_to_the_mean_but_no_candidate() -> None:
    group = [Observation(20), Observation(20), Observation(20, censored=True)]
    *_, (stopped, censored) = ratios(group)
    (finished, _), *_ = ratios(group)
    assert censored
    assert stopped > finished
    earlier = PromptStats(std_ema=None, mean_ema=20.0, groups=1, candidates=9, weight_version=None)
    assert values(group, earlier)[0] == pytest.approx(1.0)


def test_a_single_candidate_has_a_ratio_only_to_earlier_groups() -> None:
    assert ratios([Observation(20)]) == []
    earlier = PromptStats(std_ema=None, mean_ema=40.0, groups=1, candidates=1, weight_version=None)
    assert values([Observation(20)], earlier) == pytest.approx([1.5 * 20 / 50])
    assert len(values([Observation(0), Observation(20)], earlier)) == 1


def test_groups_without_finished_candidates_have_ratios() -> None:
    group = [Observation(20, censored=True), Observation(30, censored=True)]
    assert all(ratio > 0 and censored for ratio, censored in ratios(group))


@pytest.mark.parametrize("groups", [1, 2, 5, 40])
def test_the_candidates_of_a_mean_follow_from_the_weights_of_its_groups(groups: int) -> None:
    weights = [0.7 ** (groups - 1), *(0.3 * 0.7 ** (groups - 1 - k) for k in range(1, groups))]
    stats = PromptStats(std_ema=None, mean_ema=1.0, groups=groups, candidates=12 * groups, weight_version=None)
    assert sum(weights) == pytest.approx(1)
    assert stats.effective_candidates == pytest.approx(12 / sum(weight**2 for weight in weights))


def test_there_are_no_quantiles_before_a_candidate_has_finished() -> None:
    profile = LengthProfile()
    profile.observe([(1.0, True)] * 5)
    assert profile.quantiles(10) is None
