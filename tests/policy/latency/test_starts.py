"""Learning what a sequence costs when it starts."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.latency.model import LatencyModel, LatencyState
from darts_server.policy.latency.starts import MAX_STARTS, MAX_WEIGHT, MIN_STARTS, Start, start_seconds

CURVE = LatencyCurve((1.0, 100.0), (0.01, 0.03), 0.0002)
COST = 0.003


def steps(count: int, noise: float = 0.05, stalls: float = 0.0, cost: float = COST) -> list[Start]:
    """Steps as of batches that start at once, and of candidates that take the place of others."""
    rng = np.random.default_rng(count)
    made = []
    for _ in range(count):
        started = int(rng.choice([1, 2, 5, 20, 60]))
        batch = started + int(rng.integers(1, 60))
        seconds = CURVE.step_seconds(batch) * float(np.exp(noise * rng.standard_normal())) + cost * started
        made.append((batch, started, seconds + 5.0 * (rng.random() < stalls)))
    return made


def taught(model: LatencyModel) -> LatencyModel:
    for batch in (1, 2, 4, 8, 16, 32, 64, 100, 128):
        for _ in range(20):
            model.observe(batch, CURVE.step_seconds(batch))
    return model


@pytest.mark.parametrize("stalls", [0.0, 0.2])
def test_the_cost_is_found_among_noise_and_stalls(stalls: float) -> None:
    assert start_seconds(steps(100, stalls=stalls), CURVE) == pytest.approx(COST, rel=0.05)


def test_it_is_the_same_by_many_small_steps_as_by_a_few_large_ones() -> None:
    small = [(100, 1, CURVE.step_seconds(100) + COST)] * 60
    large = [(100, 100, CURVE.step_seconds(100) + 100 * COST)] * MIN_STARTS
    assert start_seconds(small, CURVE) == pytest.approx(start_seconds(large, CURVE))


def test_a_step_counts_by_those_that_start_in_it() -> None:
    few = [(100, 1, CURVE.step_seconds(100) + 2 * COST)] * 50
    many = [(100, 60, CURVE.step_seconds(100) + 60 * COST)] * 5
    assert start_seconds(few + many, CURVE) == pytest.approx(COST)
    assert start_seconds(few, CURVE) == pytest.approx(2 * COST)


def test_one_step_that_stalled_with_most_of_the_starts_does_not_decide() -> None:
    usual = [(20, 1, CURVE.step_seconds(20) + COST)] * 127
    after_a_pause = (128, 128, 20.0)
    assert start_seconds([*usual, after_a_pause], CURVE) == pytest.approx(COST)
    few = [*usual[:11], *[(60, 40, CURVE.step_seconds(60) + 40 * COST)] * 2]
    assert start_seconds([*few, after_a_pause], CURVE) == pytest.approx(COST)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 1.0)), min_size=MIN_STARTS, max_size=30))
def test_no_other_cost_has_a_smaller_sum_of_absolute_deviations(seen: list[tuple[int, float]]) -> None:
    made = [(started + 1, started, seconds) for started, seconds in seen]

    most = MAX_WEIGHT * sum(n for _, n, _ in made)

    def deviations(cost: float) -> float:
        """Each times its n, but for those that count less."""
        return sum(abs((s - CURVE.step_seconds(batch)) / n - cost) * min(n, most) for batch, n, s in made)

    found = start_seconds(made, CURVE)
    assert found is not None
    # Of a sum that bends at these points only, one is the smallest; a negative cost is none.
    bends = [max(0.0, (s - CURVE.step_seconds(batch)) / n) for batch, n, s in made]
    assert deviations(found) <= min(map(deviations, bends)) + 1e-9


def test_starts_that_take_no_longer_than_decoding_cost_nothing() -> None:
    assert start_seconds([(50, 10, 0.5 * CURVE.step_seconds(50))] * MIN_STARTS, CURVE) == 0.0


def test_it_is_not_known_before_there_are_a_few_such_steps_and_a_curve() -> None:
    model = LatencyModel()
    for step in [(40, 20, CURVE.step_seconds(40) + 20 * COST)] * (MIN_STARTS - 1):
        model.observe(step[0], step[2], step[1])
    assert model.start_seconds is None
    taught(model)
    assert model.start_seconds is None
    model.observe(40, CURVE.step_seconds(40) + 20 * COST, 20)
    assert model.start_seconds == pytest.approx(COST, rel=0.1)
    assert LatencyModel(LatencyState(starts=((40, 20, 0.1),) * MIN_STARTS)).start_seconds is None


def test_steps_with_starts_are_no_part_of_the_curve() -> None:
    model = taught(LatencyModel())
    before = model.curve
    for batch, started, seconds in steps(200):
        model.observe(batch, seconds, started)
    assert model.curve == before
    assert model.start_seconds == pytest.approx(COST, rel=0.1)


def test_an_engine_whose_starts_became_dearer_is_believed() -> None:
    model = taught(LatencyModel())
    for cost in (COST, 4 * COST):
        for batch, started, seconds in steps(MAX_STARTS, cost=cost):
            model.observe(batch, seconds, started)
    assert model.start_seconds == pytest.approx(4 * COST, rel=0.1)


def test_the_state_survives_json_and_is_bounded() -> None:
    model = taught(LatencyModel())
    for batch, started, seconds in steps(2 * MAX_STARTS):
        model.observe(batch, seconds, started)
    restored = LatencyState(**json.loads(json.dumps(asdict(model.state))))
    assert restored == model.state
    assert len(restored.starts) == MAX_STARTS
    assert LatencyModel(restored).start_seconds == model.start_seconds


def test_a_state_from_before_starts_were_learned_can_be_used() -> None:
    state = asdict(taught(LatencyModel()).state)
    del state["starts"]
    model = LatencyModel(LatencyState(**state))
    assert model.curve is not None
    assert model.start_seconds is None


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ((3, 0, 0.1), "starts must be a whole number in"),
        ((3, 4, 0.1), "starts must be a whole number in"),
        ((3, 1.0, 0.1), "starts must be a whole number in"),
        ((3, 1, 0.0), "starts must be a number in"),
        ((3, 1, float("nan")), "starts must be a number in"),
        ((3, 1), "not enough values"),
    ],
)
def test_a_state_out_of_range_is_refused(start: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyState(starts=(start,))


def test_a_state_with_too_many_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=f"starts must have at most {MAX_STARTS} values"):
        LatencyState(starts=((2, 1, 0.1),) * (MAX_STARTS + 1))


@pytest.mark.parametrize("started", [-1, 4])
def test_more_starts_than_sequences_are_refused(started: int) -> None:
    model = LatencyModel()
    with pytest.raises(ValueError, match="started must be from 0 to the batch, 3"):
        model.observe(3, 0.1, started)
    assert model.state == LatencyState()
