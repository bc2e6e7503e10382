"""Survival by roulette: the formula, what it is best for, and when it stops nothing."""

from math import exp, fsum, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.pruning.roulette import (
    FEWEST_LONGER,
    LEAST_SHARE,
    RATIOS,
    Floats,
    GroupRoulette,
    Loss,
    PromptForecast,
    Roulette,
    end_rate,
)
from darts_server.policy.pruning.survival import Pruning

PLACES = (np.arange(RATIOS) + 0.5) / RATIOS
QUALITIES = st.none() | st.floats(0, 1)
LENGTHS = st.lists(st.floats(1, 1e5), min_size=FEWEST_LONGER + 1, max_size=60).map(lambda x: np.asarray(sorted(x)))


class NoRecord:
    """Roulette does not depend on what was scored before."""

    def survival(self, quality: float, pruning: Pruning) -> float:
        raise AssertionError


def log_normal(sigma: float) -> Floats:
    ratios: Floats = np.asarray([exp(sigma * NormalDist().inv_cdf(p)) for p in PLACES])
    return np.asarray(ratios / ratios.mean())


def forecast(lengths: Floats, pass_rate: float | None = None) -> PromptForecast:
    mean = float(lengths.mean())
    return PromptForecast(mean, lengths / mean, pass_rate)


def transcribed_rate(lengths: Floats, tokens: int, loss: Loss) -> float:
    """G, by trying every further budget."""
    last = sorted(lengths)[-FEWEST_LONGER - 1]
    start = tokens if (lengths > tokens).sum() >= FEWEST_LONGER else last
    longer = sorted(lengths)[-max(FEWEST_LONGER, int((lengths > tokens).sum())) :]
    rates = []
    for ended, end in enumerate(longer, start=1):
        spent = fsum(min(length, end) - start for length in longer)
        if ended > int(LEAST_SHARE * len(longer)):
            gained = fsum(longer[:ended]) if loss is Loss.TOKEN else ended
            rates.append(gained / max(spent, ended))
    return max(rates)


@given(LENGTHS, st.integers(0, 200_000), st.sampled_from(Loss))
def test_the_rate_is_the_best_of_all_budgets(lengths: Floats, tokens: int, loss: Loss) -> None:
    assert end_rate(lengths, tokens, loss) == pytest.approx(transcribed_rate(lengths, tokens, loss), rel=1e-9)


@given(LENGTHS)
def test_where_gradients_grow_with_length_nothing_is_stopped_for_its_length_alone(lengths: Floats) -> None:
    assert not GroupRoulette(Roulette(), forecast(lengths)).checkpoints


@given(
    LENGTHS,
    st.sampled_from(Loss),
    st.none() | st.floats(0.02, 0.98),
    st.floats(0.01, 1),
    st.lists(st.tuples(st.integers(1, 200_000), QUALITIES), max_size=6),
)
def test_survival_is_what_the_docstring_says(
    lengths: Floats, loss: Loss, b: float | None, least: float, scores: list[tuple[int, float | None]]
) -> None:
    roulette = Roulette(least, loss).for_prompt(lambda: forecast(lengths, b))
    mean = float(lengths.mean())
    lengths = lengths / mean * mean  # rounded as there
    survival, value = 1.0, 1.0
    for tokens, q in scores:
        if q is not None and b is not None:
            value = (q * (1 - b) ** 2 + (1 - q) * b**2) / (b * (1 - b))
        wanted = sqrt(value * transcribed_rate(lengths, tokens, loss) / transcribed_rate(lengths, 0, loss))
        after = min(survival, max(least, wanted))
        assert roulette.at_score(3, tokens, q, NoRecord()) == pytest.approx(after / survival, rel=1e-9)
        survival = after
    assert survival >= min(1.0, least)


@pytest.mark.parametrize("known", [PromptForecast(), PromptForecast(100.0), PromptForecast(None, log_normal(2.0))])
def test_without_lengths_and_rewards_nothing_is_stopped(known: PromptForecast) -> None:
    roulette = GroupRoulette(Roulette(), known)
    assert not roulette.checkpoints
    assert [roulette.at_score(0, tokens, q, NoRecord()) for tokens, q in ((10, 0.1), (1000, None), (9999, 0.9))] == [
        1
    ] * 3


@pytest.mark.parametrize(
    "lengths",
    [
        np.full(RATIOS, 100.0),
        200 * PLACES,
        100 + 10 * np.sqrt(PLACES),
        -100 * np.log(1 - PLACES),
        100 * log_normal(0.3),
    ],
    ids=["equal", "uniform", "rising hazard", "exponential", "log-normal, sigma 0.3"],
)
def test_light_tails_are_not_stopped(lengths: Floats) -> None:
    roulette = GroupRoulette(Roulette(loss=Loss.SEQUENCE), forecast(lengths))
    survival = 1.0
    for tokens in roulette.checkpoints:
        survival *= roulette.at_checkpoint(0, tokens)
    assert survival > 0.9


def product_of_variance_and_cost(lengths: Floats, survivals: Floats) -> float:
    """Relative to plain sampling. ``survivals``: between each length, ascending, and the one before."""
    between = np.diff(lengths, prepend=0.0) * np.arange(lengths.size, 0, -1)
    return float((1 / survivals).mean() * (survivals @ between) / between.sum())


def curve(lengths: Floats) -> Floats:
    """Survival up to each length, from its checkpoints."""
    roulette = GroupRoulette(Roulette(0.01, Loss.SEQUENCE), forecast(lengths))
    survivals, survival, points = [], 1.0, list(roulette.checkpoints)
    for length in lengths:
        while points and points[0] < length:
            survival *= roulette.at_checkpoint(0, points.pop(0))
        survivals.append(survival)
    return np.asarray(survivals)


def by_mean_residual(lengths: Floats) -> Floats:
    """Survival with 1 / R(c) in place of G(c)."""
    residual = np.asarray(
        [lengths[i:].mean() - (lengths[i - 1] if i else 0) for i in range(lengths.size - FEWEST_LONGER)]
    )
    residual = np.append(residual, np.full(FEWEST_LONGER, residual[-1]))
    return np.minimum.accumulate(np.minimum(1.0, np.sqrt(residual[0] / residual)))


@pytest.mark.parametrize("sigma", [0.3, 0.6, 1.0, 1.5, 2.0])
def test_variance_times_cost_is_less_than_without_and_than_by_the_mean_residual_length(sigma: float) -> None:
    lengths = 1000 * log_normal(sigma)
    product = product_of_variance_and_cost(lengths, curve(lengths))
    assert product < 1.001
    assert product < 1.001 * product_of_variance_and_cost(lengths, by_mean_residual(lengths))


@given(st.lists(st.floats(0.3, 1), min_size=8, max_size=8), st.sampled_from([1.0, 1.5, 2.0]))
def test_no_other_falling_curve_is_much_better(factors: list[float], sigma: float) -> None:
    lengths = 1000 * log_normal(sigma)
    other = np.repeat(np.cumprod(np.asarray(factors)), RATIOS // 8)
    assert product_of_variance_and_cost(lengths, curve(lengths)) < 1.02 * product_of_variance_and_cost(lengths, other)


def test_of_a_heavy_tail_fewer_go_on() -> None:
    survivals = curve(1000 * log_normal(2.0))
    assert survivals[0] == 1
    assert survivals[-1] < 0.5
    assert (np.diff(survivals) <= 0).all()


@pytest.mark.parametrize(("b", "kept"), [(0.9, "wrong"), (0.1, "right"), (0.5, "both")])
def test_the_rarer_kind_is_kept(b: float, kept: str) -> None:
    survivals = {
        kind: GroupRoulette(Roulette(), PromptForecast(pass_rate=b)).at_score(0, 10, q, NoRecord())
        for kind, q in (("right", 1.0), ("wrong", 0.0))
    }
    for kind, survival in survivals.items():
        rate = (1 - b) / b if kind == "right" else b / (1 - b)
        assert survival == pytest.approx(min(1.0, max(0.1, sqrt(rate))))
        assert (survival == 1) == (kept in (kind, "both"))


def test_a_pass_rate_of_all_or_none_is_not_taken_literally() -> None:
    for b, q in ((1.0, 1.0), (0.0, 0.0)):
        sure = GroupRoulette(Roulette(0.01), PromptForecast(pass_rate=b)).at_score(0, 10, q, NoRecord())
        assert sure == pytest.approx(sqrt(0.02 / 0.98))


def test_candidates_have_their_own_survival() -> None:
    roulette = Roulette().for_prompt(lambda: PromptForecast(pass_rate=0.9))
    first = roulette.at_score(0, 10, 1.0, NoRecord())
    assert roulette.at_score(1, 10, 1.0, NoRecord()) == first < 1
    assert roulette.at_score(0, 20, 1.0, NoRecord()) == 1, "it is contained in what came before"


def test_a_rate_is_computed_once_for_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(lengths: Floats, tokens: int, loss: Loss) -> float:
        computed.append(tokens)
        return end_rate(lengths, tokens, loss)

    group = GroupRoulette(Roulette(loss=Loss.SEQUENCE), forecast(1000 * log_normal(1.4)))
    monkeypatch.setattr("darts_server.policy.pruning.roulette.end_rate", counted)
    survivals = {group.at_checkpoint(index, 5001) for index in range(1024)}
    assert len(survivals) == 1
    assert computed == [5001], "an event of a thousand candidates must not hold the event loop"


@pytest.mark.parametrize("least", [0.0, -0.1, 1.1])
def test_minimums_out_of_range_are_refused(least: float) -> None:
    with pytest.raises(ValueError, match="min_survival"):
        Roulette(least)


def test_pruning_by_quality_has_one_rule_for_all_prompts_and_no_checkpoints() -> None:
    class Record:
        def survival(self, quality: float, pruning: Pruning) -> float:
            return quality / 2

    pruning = Pruning()
    rule = pruning.for_prompt(PromptForecast)
    assert rule is pruning
    assert (rule.checkpoints, rule.at_checkpoint(0, 10)) == ((), 1.0)
    assert [rule.at_score(0, 10, q, Record()) for q in (None, 0.5)] == [1.0, 0.25]
