"""Mean and spread of lengths with stopped candidates, and the statistics of prompts and data set."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.estimates.lengths import (
    KEPT_LENGTHS,
    WINDOW_STEPS,
    DatasetStats,
    FittedShape,
    LengthEstimate,
    Observation,
    PromptStats,
    complete_sample,
    estimate_lengths,
    update_stats,
)

Lengths = NDArray[np.float64]
Stopping = Callable[[Lengths, np.random.Generator], list[Observation]]

TOKENS = st.integers(1, 12) | st.integers(1, 40_000)
OBSERVATIONS = st.lists(st.builds(Observation, TOKENS, st.booleans()), min_size=1, max_size=20)


def ended(*tokens: int) -> list[Observation]:
    return [Observation(t) for t in tokens]


def stopped(*tokens: int) -> list[Observation]:
    return [Observation(t, censored=True) for t in tokens]


# --- without censoring ------------------------------------------------------


@given(st.lists(TOKENS, min_size=2, max_size=20))
def test_without_censoring_the_estimate_is_mean_and_sample_std(tokens: list[int]) -> None:
    plain = estimate_lengths(ended(*tokens))
    assert plain.mean == pytest.approx(statistics.mean(tokens), rel=1e-14)
    assert plain.std == pytest.approx(statistics.stdev(tokens), rel=1e-12)


def test_one_candidate_has_no_std() -> None:
    assert estimate_lengths(ended(7)) == LengthEstimate(7, None)
    assert estimate_lengths(stopped(7)) == LengthEstimate(7, None)


# --- the bias ---------------------------------------------------------------


def log_normal(median: float, sigma: float) -> Callable[[np.random.Generator, int], Lengths]:
    return lambda rng, n: np.ceil(rng.lognormal(math.log(median), sigma, n))


def geometric(mean: float) -> Callable[[np.random.Generator, int], Lengths]:
    return lambda rng, n: rng.geometric(1 / mean, n).astype(np.float64)


def two_modes(short: float, long: float, share: float) -> Callable[[np.random.Generator, int], Lengths]:
    """Two narrow log-normal modes; ``share`` of the lengths are in the long mode."""
    modes = log_normal(short, 0.3), log_normal(long, 0.3)
    return lambda rng, n: np.where(rng.random(n) < share, modes[1](rng, n), modes[0](rng, n))


def shortest(lengths: Lengths, _: np.random.Generator) -> list[Observation]:
    """The 8 shortest finish, and the others are stopped when they have as many tokens as the 8th."""
    bar = int(np.sort(lengths)[7])
    return [Observation(min(int(x), bar), censored=x > bar) for x in lengths]


def sampled_tail(lengths: Lengths, rng: np.random.Generator) -> list[Observation]:
    """The 7 shortest and one sampled candidate finish, and the others are stopped at the length of the 7th."""
    order = np.argsort(lengths, kind="stable")
    bar = int(lengths[order[6]])
    drawn = rng.choice(order[7:])
    return [
        Observation(int(x)) if x <= bar or i == drawn else Observation(bar, censored=True)
        for i, x in enumerate(lengths)
    ]


# Mean std over many groups of 12 and of 16, relative to the true mean std of these groups.
NARROW, WIDE, HEAVY = log_normal(200, 0.3), log_normal(200, 0.5), log_normal(200, 0.8)
GEOMETRIC, EVEN, UNEVEN = geometric(200), two_modes(150, 600, 0.5), two_modes(150, 450, 0.3)
MOSTLY_LONG = two_modes(150, 600, 0.7)
FIGURES = [
    pytest.param(NARROW, shortest, 0.99, 0.99, id="log-normal 0.3, shortest", marks=pytest.mark.nightly),
    pytest.param(WIDE, shortest, 0.89, 0.85, id="log-normal 0.5, shortest", marks=pytest.mark.nightly),
    pytest.param(HEAVY, shortest, 0.76, 0.67, id="log-normal 0.8, shortest"),
    pytest.param(GEOMETRIC, shortest, 0.98, 0.92, id="geometric, shortest"),
    pytest.param(EVEN, shortest, 1.23, 0.92, id="two even modes, shortest"),
    pytest.param(UNEVEN, shortest, 0.68, 0.45, id="the longer mode rare, shortest", marks=pytest.mark.nightly),
    pytest.param(NARROW, sampled_tail, 0.97, 0.97, id="log-normal 0.3, sampled tail", marks=pytest.mark.nightly),
    pytest.param(WIDE, sampled_tail, 0.92, 0.88, id="log-normal 0.5, sampled tail", marks=pytest.mark.nightly),
    pytest.param(HEAVY, sampled_tail, 0.83, 0.76, id="log-normal 0.8, sampled tail"),
    pytest.param(GEOMETRIC, sampled_tail, 0.94, 0.90, id="geometric, sampled tail", marks=pytest.mark.nightly),
    pytest.param(EVEN, sampled_tail, 1.05, 0.94, id="two even modes, sampled tail"),
    pytest.param(UNEVEN, sampled_tail, 0.83, 0.74, id="the longer mode rare, sampled tail"),
]
ROUNDS = 700


@pytest.mark.untraced
@pytest.mark.parametrize(("draw", "stop", "of_12", "of_16"), FIGURES)
def test_the_bias_of_the_std_is_what_the_docstring_says(
    draw: Callable[[np.random.Generator, int], Lengths], stop: Stopping, of_12: float, of_16: float
) -> None:
    for candidates, expected in ((12, of_12), (16, of_16)):
        ratio, naive = ratios(draw, stop, candidates)
        assert ratio == pytest.approx(expected, abs=0.06)
        assert abs(math.log(ratio)) < 0.75 * abs(math.log(naive))


@pytest.mark.untraced
@pytest.mark.parametrize(("stop", "of_12", "of_16"), [(shortest, 1.51, 1.77), (sampled_tail, 1.19, 1.30)])
def test_two_modes_become_too_wide_if_only_the_short_end_of_the_long_mode_shows(
    stop: Stopping, of_12: float, of_16: float
) -> None:
    assert ratios(MOSTLY_LONG, stop, 12)[0] == pytest.approx(of_12, abs=0.06)
    assert ratios(MOSTLY_LONG, stop, 16)[0] == pytest.approx(of_16, abs=0.06)


def ratios(draw: Callable[[np.random.Generator, int], Lengths], stop: Stopping, candidates: int) -> tuple[float, float]:
    """Return the mean estimated std, and the mean std of finished candidates alone, relative to the true mean std."""
    rng = np.random.default_rng(candidates)
    groups = [draw(rng, candidates) for _ in range(ROUNDS)]
    whole = statistics.fmean(float(np.std(lengths, ddof=1)) for lengths in groups)
    observed = [stop(lengths, rng) for lengths in groups]
    naive = statistics.fmean(known_std([c for c in o if not c.censored]) for o in observed)
    return statistics.fmean(known_std(o) for o in observed) / whole, naive / whole


@pytest.mark.untraced
@pytest.mark.parametrize("draw", [WIDE, EVEN])
@pytest.mark.parametrize("stop", [shortest, sampled_tail])
def test_the_mean_is_not_biased(draw: Callable[[np.random.Generator, int], Lengths], stop: Stopping) -> None:
    rng = np.random.default_rng(2)
    groups = [draw(rng, 12) for _ in range(ROUNDS)]
    estimated = statistics.fmean(estimate_lengths(stop(lengths, rng)).mean for lengths in groups)
    assert estimated == pytest.approx(statistics.fmean(float(x.mean()) for x in groups), rel=0.08)


def known_std(observations: list[Observation]) -> float:
    std = estimate_lengths(observations).std
    assert std is not None
    return std


# --- properties -------------------------------------------------------


@given(OBSERVATIONS)
def test_a_censored_length_counts_at_least_where_it_was_stopped(observations: list[Observation]) -> None:
    guess = estimate_lengths(observations)
    assert guess.mean >= statistics.fmean(o.tokens for o in observations) * (1 - 1e-9)
    assert guess.mean < 100 * sum(o.tokens for o in observations)
    assert (guess.std is None) == (len(observations) == 1)
    assert guess.std is None or 0 <= guess.std < 100 * sum(o.tokens for o in observations)


@given(OBSERVATIONS, st.randoms())
def test_the_order_of_the_candidates_does_not_matter(observations: list[Observation], random: Random) -> None:
    shuffled = random.sample(observations, len(observations))
    once = estimate_lengths(observations)
    again = estimate_lengths(shuffled)
    assert once.mean == pytest.approx(again.mean)
    assert once.std == (None if again.std is None else pytest.approx(again.std, rel=1e-6, abs=1e-6))


def test_equal_lengths_with_others_stopped_there_leave_some_spread() -> None:
    guess = estimate_lengths(ended(*[23] * 8) + stopped(*[23] * 8))
    assert 23 < guess.mean < 26
    assert guess.std is not None
    assert 0 < guess.std < 6


def test_one_token_longer_gets_no_vote() -> None:
    at_the_bar = estimate_lengths(ended(100, 150, 200, 210) + stopped(210, 210, 210, 210))
    just_before = estimate_lengths(ended(100, 150, 200, 210) + stopped(209, 209, 209, 209))
    assert just_before.mean == pytest.approx(at_the_bar.mean, rel=0.01)


def test_a_longer_stopped_candidate_passes_on_its_votes() -> None:
    direct = estimate_lengths(ended(10, 20, 1000) + stopped(30, 30))
    chained = estimate_lengths(ended(10, 20, 1000) + stopped(30, 500))
    assert chained.mean > direct.mean


def test_a_short_candidate_among_many_stopped_candidates_gives_a_limited_estimate() -> None:
    guess = estimate_lengths(ended(3) + stopped(*[256] * 15))
    # One end in as many tokens.
    assert guess.mean == pytest.approx(3 + 15 * 256)
    assert estimate_lengths(ended(1) + stopped(*[1_000_000] * 100)).mean < 1.01 * 100_000_000


def test_if_no_candidate_finished_the_longest_counts_as_finished() -> None:
    assert estimate_lengths(stopped(5, 9, 9)) == estimate_lengths(ended(9) + stopped(5, 9))


def test_candidates_without_tokens_are_ignored() -> None:
    assert estimate_lengths(ended(4, 6) + stopped(0, 0)) == estimate_lengths(ended(4, 6))


@pytest.mark.parametrize("nothing", [[], stopped(0, 0)])
def test_observations_without_any_token_are_refused(nothing: list[Observation]) -> None:
    with pytest.raises(ValueError, match="at least one candidate"):
        estimate_lengths(nothing)


def test_a_completed_sample_keeps_all_weights_and_makes_stopped_candidates_longer() -> None:
    observations = [Observation(10), Observation(20), Observation(60), Observation(20, censored=True)]
    pairs = complete_sample([*observations, Observation(0, censored=True)])
    assert sum(weight for weight, _ in pairs) == pytest.approx(4)
    mean = sum(weight * length for weight, length in pairs) / 4
    assert mean == pytest.approx(estimate_lengths(observations).mean)
    assert max(length for _, length in pairs) >= 60


@pytest.mark.parametrize("censored", [False, True])
def test_a_sample_of_only_finished_or_only_censored_candidates_is_unchanged(censored: bool) -> None:
    observations = [Observation(tokens, censored=censored) for tokens in (3, 5)]
    assert complete_sample(observations) == [(1.0, 3.0), (1.0, 5.0)]


# --- fitted shape ------------------------------------------------------------


@pytest.mark.parametrize("tokens", [100, 300, 1_000, 10_000, 1_000_000])
def test_a_candidate_in_the_far_tail_is_expected_to_finish_within_the_mean_wait(tokens: int) -> None:
    """Density and survival of the normal underflow beyond 30 standard deviations."""
    first, second = FittedShape(mean=2.0, std=0.1, tokens_per_end=5.0).moments_beyond(tokens)
    assert tokens < first <= tokens + 5
    assert first**2 <= second <= (tokens + 5) ** 2 + 5**2


def test_one_candidate_far_beyond_all_others_widens_the_shape() -> None:
    narrow = FittedShape.fit([10] * 5, [])
    wide = FittedShape.fit([10] * 5, [100_000])
    assert narrow.std < wide.std < math.inf
    assert narrow.mean < wide.mean < math.inf


@pytest.mark.parametrize(
    "wrong", [{"mean_ema": math.nan}, {"std_ema": -1.0}, {"groups": math.inf}, {"candidates": "8"}]
)
def test_statistics_that_are_not_finite_numbers_are_rejected(wrong: dict[str, Any]) -> None:
    right = {"std_ema": 1.0, "mean_ema": 2.0, "groups": 3, "candidates": 8, "weight_version": None}
    with pytest.raises(ValueError, match=r"must be a (whole )?number in"):
        PromptStats(**(right | wrong))


# --- stats -------------------------------------------------------------------


def updated(stats: PromptStats | None, observations: list[Observation], version: int = 1, **seen: int) -> PromptStats:
    return update_stats(stats, observations, estimate_lengths(observations), version, **seen)


def test_the_first_group_counts_fully_and_later_groups_are_averaged() -> None:
    first = updated(None, ended(10, 20), 1)
    assert first == PromptStats(math.sqrt(50), 15, 1, 2, 1, lengths="10 20")
    second = updated(first, ended(30, 30, 30), 4)
    assert second == PromptStats(0.7 * math.sqrt(50), 0.3 * 30 + 0.7 * 15, 2, 5, 4, lengths="30 30 30")


def test_a_group_of_one_does_not_change_the_std() -> None:
    first = updated(None, ended(10))
    assert first.std_ema is None
    second = updated(first, ended(10, 20))
    assert second.std_ema == pytest.approx(math.sqrt(50))
    assert updated(second, ended(99)).std_ema == second.std_ema


def test_the_lengths_of_the_last_group_are_kept() -> None:
    observed = ended(40, 96) + stopped(96, 31, 0)
    first = updated(None, observed, max_tokens=96, prompt_tokens=7)
    assert (first.max_tokens, first.prompt_tokens, first.lengths) == (96, 7, "40 96 96+ 31+")
    assert first.observations == observed[:-1]
    assert [first.is_truncated(o) for o in first.observations] == [False, False, True, False]
    second = updated(first, ended(5))
    assert (second.max_tokens, second.prompt_tokens, second.lengths) == (None, 7, "5")
    assert updated(second, ended(5), prompt_tokens=9).prompt_tokens == 9
    many = updated(None, ended(*[3] * 2 * KEPT_LENGTHS))
    assert len(many.observations) == KEPT_LENGTHS


def test_statistics_of_an_earlier_version_have_no_observations() -> None:
    stats = PromptStats(std_ema=1.0, mean_ema=2.0, groups=3, candidates=8, weight_version=None)
    assert (stats.max_tokens, stats.prompt_tokens, stats.observations) == (None, None, [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": "4 -1"}, "lengths must be at most 256 token counts"),
        ({"lengths": "4,5"}, "lengths must be at most 256 token counts"),
        ({"lengths": None}, "lengths must be at most 256 token counts"),
        ({"lengths": "4 5\n"}, "lengths must be at most 256 token counts"),
        ({"lengths": " ".join(["1"] * 257)}, "lengths must be at most 256 token counts"),
        ({"lengths": "40 97+", "max_tokens": 96}, "lengths must be at most max_tokens, 96, got 97"),
        ({"max_tokens": 0}, "max_tokens must be a whole number in"),
        ({"prompt_tokens": 1.5}, "prompt_tokens must be a whole number in"),
    ],
)
def test_impossible_lengths_are_rejected(wrong: dict[str, Any], message: str) -> None:
    right = {"std_ema": 1.0, "mean_ema": 2.0, "groups": 3, "candidates": 8, "weight_version": None}
    with pytest.raises(ValueError, match=message):
        PromptStats(**(right | wrong))


def test_the_data_set_averages_stds_over_ten_steps_and_takes_the_last_mean() -> None:
    stats = DatasetStats()
    assert (stats.std, stats.mean) == (None, None)
    for number in range(15):
        stats = stats.with_step(
            [LengthEstimate(number, number), LengthEstimate(number + 2, number + 4), LengthEstimate(number + 1, None)]
        )
    assert WINDOW_STEPS == 10
    assert stats.std == pytest.approx(statistics.fmean(range(5 + 2, 15 + 2)))
    assert stats.mean == 15
    assert stats.steps == 15


def test_a_step_without_stds_keeps_the_window_and_an_empty_step_changes_nothing() -> None:
    stats = DatasetStats().with_step([LengthEstimate(10, 3)])
    assert stats.with_step([]) is stats
    assert stats.with_step([LengthEstimate(20, None)]) == DatasetStats((3,), 20, 2)


def test_statistics_survive_json() -> None:
    prompt = updated(None, ended(10, 20) + stopped(20), 3, max_tokens=20, prompt_tokens=3)
    dataset = DatasetStats().with_step([LengthEstimate(10, 3)]).with_step([LengthEstimate(11, 4.5)])
    assert PromptStats(**json.loads(json.dumps(asdict(prompt)))) == prompt
    assert DatasetStats(**json.loads(json.dumps(asdict(dataset)))) == dataset
