"""The time of a step by batch size, and by the number of sequences that start in it."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.estimates.latency import (
    MAX_STARTS,
    MAX_WEIGHT,
    MIN_STARTS,
    MIN_STEPS,
    STEPS_PER_BIN,
    LatencyCurve,
    LatencyModel,
    Start,
    start_seconds,
)

FLAT = LatencyCurve((1.0,), (0.02,))
PROPORTIONAL = LatencyCurve((1.0,), (0.004,), 0.004)
BENT = LatencyCurve((1.0, 4.0, 8.0), (0.02, 0.02, 0.04), 0.005)


def simulated(lengths: Sequence[int], capacity: int, curve: LatencyCurve) -> float:
    """Return the seconds of a rollout, simulated step by step."""
    waiting = [x for x in lengths if x]
    running = list[int]()
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < capacity:
            running.append(waiting.pop(0))
        seconds += curve.step_seconds(len(running))
        running = [left - 1 for left in running if left > 1]
    return seconds


@given(
    st.lists(st.integers(0, 12), max_size=25),
    st.none() | st.integers(1, 8),
    st.sampled_from([FLAT, PROPORTIONAL, BENT]),
)
def test_a_rollout_takes_as_long_as_its_steps_and_sequences_beyond_the_capacity_queue(
    lengths: list[int], capacity: int | None, curve: LatencyCurve
) -> None:
    expected = simulated(lengths, capacity or len(lengths), curve)
    assert curve.completion_seconds(lengths, capacity).max(initial=0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("capacity", "seconds"), [(None, 9 * 0.02), (3, 9 * 0.02), (2, 14 * 0.02)])
def test_a_rollout_with_a_queue_takes_longer(capacity: int | None, seconds: float) -> None:
    assert FLAT.completion_seconds([5, 7, 9], capacity).max() == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("capacity", "seconds"),
    [
        (None, [3.0 * 2 + 2.0 * 4, 3.0 * 2, 3.0 * 2 + 2.0 * 4 + 1.0 * 3]),
        # The third sequence starts when the second one has ended.
        (2, [2.0 * 6, 2.0 * 2, 2.0 * 6 + 1.0 * 5]),
    ],
)
def test_each_sequence_is_complete_after_the_steps_until_its_end(capacity: int | None, seconds: list[float]) -> None:
    curve = LatencyCurve((1.0, 3.0), (1.0, 3.0), 1.0)
    assert curve.completion_seconds([6, 2, 9], capacity).tolist() == pytest.approx(seconds)
    assert curve.completion_seconds([], capacity).size == 0


def test_the_curve_is_linear_between_its_points_and_extrapolated_beyond_them() -> None:
    assert [BENT.step_seconds(b) for b in (0.3, 1, 2, 4, 6, 8, 10)] == pytest.approx(
        [0.02, 0.02, 0.02, 0.02, 0.03, 0.04, 0.05]
    )
    batches = np.asarray([[0.5, 3.0, 5.0], [7.5, 8.0, 900.0]])
    expected = [[BENT.step_seconds(b) for b in row] for row in batches.tolist()]
    assert BENT.step_seconds_array(batches).tolist() == expected


@pytest.mark.parametrize("curve", [FLAT, PROPORTIONAL, BENT])
@pytest.mark.parametrize("weight", [0.2, 1.0, 5.0])
def test_in_a_scale_model_each_sequence_stands_for_several(curve: LatencyCurve, weight: float) -> None:
    for batch in (0.3, 1, 3, 4, 7, 8, 30):
        assert curve.scaled(weight).step_seconds(batch / weight) == pytest.approx(curve.step_seconds(batch))


# --- learning the curve ------------------------------------------------------------

Engine = Callable[[float], float]
SIZES = [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 180, 256]


def gpu(batch: float) -> float:
    return max(0.02, 0.02 * batch / 100)


def cpu(batch: float) -> float:
    return 0.001 + 0.004 * batch


def experts(batch: float) -> float:
    """A mixture of experts: larger batches activate more experts, until all are active."""
    return 0.01 + 0.01 * (1 - math.exp(-batch / 20)) + 0.00006 * batch


ENGINES = [gpu, cpu, experts]
UNSEEN: NDArray[np.float64] = np.unique(np.geomspace(1, 256, 150).round())


STALLS = (1.5, 2.0, 5.0, 100.0)
"""Factors on contaminated steps. Only the shortest step is usual, and counts in the mean of usual steps."""


def taught(
    model: LatencyModel,
    engine: Engine,
    steps: int,
    sizes: Sequence[int] = SIZES,
    noise: float = 0.05,
    contaminated: float = 0.0,
) -> LatencyModel:
    """Observe ``steps`` of each size, in any order. Contaminated steps last up to a hundred times as long."""
    rng = np.random.default_rng(len(sizes))
    for batch in rng.permuted(np.repeat(sizes, steps)).tolist():
        stall = float(rng.choice(STALLS)) if rng.random() < contaminated else 1.0
        model.observe(batch, engine(batch) * stall * float(np.exp(noise * rng.standard_normal())))
    return model


def known(model: LatencyModel) -> LatencyCurve:
    assert model.curve is not None
    return model.curve


def error(model: LatencyModel, engine: Engine, batches: Sequence[float] = tuple(UNSEEN)) -> float:
    """Return the largest relative error."""
    curve = known(model)
    return max(abs(curve.step_seconds(b) / engine(b) - 1) for b in batches)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("contaminated", [0.0, 0.2])
def test_the_curve_is_within_a_tenth_at_unseen_batch_sizes(engine: Engine, contaminated: float) -> None:
    with_short_stalls = 1 + contaminated / len(STALLS) * (STALLS[0] - 1)
    model = taught(LatencyModel(), engine, 60, contaminated=contaminated)
    assert error(model, lambda b: with_short_stalls * engine(b)) < 0.1


@pytest.mark.parametrize("engine", ENGINES)
def test_beyond_the_largest_size_the_slope_continues(engine: Engine) -> None:
    assert error(taught(LatencyModel(), engine, 60), engine, [300, 512, 1024]) < 0.15


@pytest.mark.parametrize(("engine", "sizes"), [(cpu, [16, 32, 64]), (gpu, [16, 32, 64]), (cpu, [40, 80])])
def test_below_the_smallest_size_the_slope_continues(engine: Engine, sizes: list[int]) -> None:
    model = taught(LatencyModel(), engine, 60, sizes, noise=0.0)
    assert error(model, engine, [4, 8, 12, 100]) < 0.1
    assert known(model).step_seconds(1) > 0


def test_varying_steps_count_by_their_mean() -> None:
    model = LatencyModel()
    rng = np.random.default_rng(0)
    for batch in rng.permuted(np.repeat(SIZES, 60)).tolist():
        model.observe(batch, cpu(batch) * float(rng.choice([0.8, 1.0, 1.5])))
    # The median would be a tenth too low.
    assert error(model, lambda b: 1.1 * cpu(b)) < 0.07


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_an_engine_that_became_slower_or_faster_is_believed_soon(factor: float) -> None:
    model = taught(LatencyModel(), gpu, 200)
    model = taught(model, lambda b: factor * gpu(b), 50)
    assert error(model, lambda b: factor * gpu(b)) < 0.1


def test_a_slower_engine_is_believed_although_larger_batches_were_faster_before() -> None:
    model = taught(LatencyModel(), gpu, 60)
    model = taught(model, lambda b: 10 * gpu(b), 600, sizes=SIZES[:6])
    assert error(model, lambda b: 10 * gpu(b), SIZES[:6]) < 0.1
    assert known(model).step_seconds(256) >= known(model).step_seconds(8)


def test_there_is_no_curve_before_two_sizes_are_known() -> None:
    model = LatencyModel()
    assert model.curve is None
    # The sizes are too near to each other.
    for batch in (8, 15):
        for _ in range(MIN_STEPS):
            model.observe(batch, 0.1)
    for _ in range(MIN_STEPS - 1):
        model.observe(16, 0.2)
        assert model.curve is None
    model.observe(16, 0.2)
    assert known(model).step_seconds(16) == pytest.approx(0.2)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 1e3)), min_size=2, max_size=12))
def test_the_curve_never_falls_and_is_always_positive(seen: list[tuple[int, float]]) -> None:
    model = LatencyModel()
    for batch, seconds in seen:
        for _ in range(MIN_STEPS):
            model.observe(batch, seconds)
    if model.curve is not None:
        values = model.curve.step_seconds_array(np.geomspace(0.5, 20_000, 300))
        assert (np.diff(values) >= -1e-12 * values[1:]).all()
        assert values[0] > 0
        assert np.isfinite(values).all()


def test_the_state_survives_json_and_continues_unchanged() -> None:
    model = taught(taught(LatencyModel(), gpu, 40), cpu, 20, sizes=[1, 5, 16, 17, 300])
    for batch, started, seconds in steps(2 * MAX_STARTS):
        model.observe(batch, seconds, started)
    text = json.dumps(model.state)
    twin = LatencyModel(**json.loads(text))
    assert json.dumps(twin.state) == text
    assert len(twin.state["starts"]) == MAX_STARTS
    assert (twin.curve, twin.start_seconds) == (model.curve, model.start_seconds)
    assert taught(twin, gpu, 5).curve == taught(model, gpu, 5).curve


def test_the_state_stays_small() -> None:
    model = taught(LatencyModel(), cpu, 2 * STEPS_PER_BIN, sizes=range(1, 1025, 3))
    assert len(json.dumps(model.state)) < 50_000
    assert max(len(steps) for steps in model.state["seconds"]) == STEPS_PER_BIN


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batches": ((1,),), "seconds": ((0.1, 0.2),), "ages": (0,)}, "equally many"),
        ({"batches": ((),), "seconds": ((),), "ages": (0,)}, "at least one, and of one bin"),
        ({"batches": ((1, 9),), "seconds": ((0.1, 0.2),), "ages": (0,)}, "at least one, and of one bin"),
        ({"batches": ((0,),), "seconds": ((0.1,),), "ages": (0,)}, "batches must be a whole number in"),
        ({"batches": ((1,),), "seconds": ((-0.1,),), "ages": (0,)}, "seconds must be a number in"),
        ({"batches": ((1,),), "seconds": ((0.1,),), "ages": (-1,)}, "ages must be a whole number in"),
        ({"batches": ((8,), (9,)), "seconds": ((0.1,), (0.1,)), "ages": (0, 0)}, "of one bin that has no other entry"),
        ({"starts": ((3, 0, 0.1),)}, "starts must be a whole number in"),
        ({"starts": ((3, 4, 0.1),)}, "starts must be a whole number in"),
        ({"starts": ((3, 1, 0.0),)}, "starts must be a number in"),
        ({"starts": ((3, 1),)}, "not enough values"),
        ({"starts": ((2, 1, 0.1),) * (MAX_STARTS + 1)}, f"starts must have at most {MAX_STARTS} values"),
    ],
)
def test_a_state_out_of_range_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyModel(**wrong)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        *(((batch, 0.1), "batch must be finite and at least 1") for batch in (0, -3, math.inf, math.nan)),
        *(((3, seconds), "seconds must be finite and above 0") for seconds in (0.0, -0.1, math.inf, math.nan)),
        *(((3, 0.1, started), "started must be from 0 to the batch, 3") for started in (-1, 4)),
    ],
)
def test_a_step_out_of_range_is_refused(step: tuple[Any, ...], message: str) -> None:
    model = LatencyModel()
    with pytest.raises(ValueError, match=message):
        model.observe(*step)
    assert model.state == LatencyModel().state


# --- starts ------------------------------------------------------------------


CURVE = LatencyCurve((1.0, 100.0), (0.01, 0.03), 0.0002)
COST = 0.003


def steps(count: int, stalls: float = 0.0) -> list[Start]:
    """Create steps of batches that start at once, and of candidates that take the place of others."""
    rng = np.random.default_rng(count)
    made = []
    for _ in range(count):
        started = int(rng.choice([1, 2, 5, 20, 60]))
        batch = started + int(rng.integers(1, 60))
        seconds = CURVE.step_seconds(batch) * float(np.exp(0.05 * rng.standard_normal())) + COST * started
        made.append((batch, started, seconds + 5.0 * (rng.random() < stalls)))
    return made


def starts_taught(model: LatencyModel) -> LatencyModel:
    for batch in (1, 2, 4, 8, 16, 32, 64, 100, 128):
        for _ in range(20):
            model.observe(batch, CURVE.step_seconds(batch))
    return model


@pytest.mark.parametrize("stalls", [0.0, 0.2])
def test_the_cost_of_a_start_is_found_among_noise_and_stalls(stalls: float) -> None:
    assert start_seconds(steps(100, stalls=stalls), CURVE) == pytest.approx(COST, rel=0.05)


def test_a_stalled_step_with_most_of_the_starts_does_not_decide_their_cost() -> None:
    usual = [(20, 1, CURVE.step_seconds(20) + COST)] * 127
    after_a_pause = (128, 128, 20.0)
    assert start_seconds([*usual, after_a_pause], CURVE) == pytest.approx(COST)
    few = [*usual[:11], *[(60, 40, CURVE.step_seconds(60) + 40 * COST)] * 2]
    assert start_seconds([*few, after_a_pause], CURVE) == pytest.approx(COST)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.0, 1.0)), min_size=MIN_STARTS, max_size=30))
def test_the_cost_of_a_start_has_the_smallest_sum_of_absolute_deviations(seen: list[tuple[int, float]]) -> None:
    made = [(started + 1, started, seconds) for started, seconds in seen]

    most = MAX_WEIGHT * sum(n for _, n, _ in made)

    def deviations(cost: float) -> float:
        """Return the sum of weighted deviations from ``cost``."""
        return sum(abs((s - CURVE.step_seconds(batch)) / n - cost) * min(n, most) for batch, n, s in made)

    found = start_seconds(made, CURVE)
    assert found is not None
    # The sum bends only at these points, so it is smallest at one of them. A cost is not negative.
    bends = [max(0.0, (s - CURVE.step_seconds(batch)) / n) for batch, n, s in made]
    assert deviations(found) <= min(map(deviations, bends)) + 1e-9


def test_the_cost_of_a_start_needs_a_curve_and_some_steps_with_starts() -> None:
    model = LatencyModel()
    for step in [(40, 20, CURVE.step_seconds(40) + 20 * COST)] * (MIN_STARTS - 1):
        model.observe(step[0], step[2], step[1])
    assert model.start_seconds is None
    starts_taught(model)
    assert model.start_seconds is None
    model.observe(40, CURVE.step_seconds(40) + 20 * COST, 20)
    assert model.start_seconds == pytest.approx(COST, rel=0.1)
    assert LatencyModel(starts=((40, 20, 0.1),) * MIN_STARTS).start_seconds is None


def test_steps_with_starts_do_not_change_the_curve() -> None:
    model = starts_taught(LatencyModel())
    before = model.curve
    for batch, started, seconds in steps(200):
        model.observe(batch, seconds, started)
    assert model.curve == before
    assert model.start_seconds == pytest.approx(COST, rel=0.1)
