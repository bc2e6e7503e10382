"""Learning the latency curve from decode steps."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.latency.model import MIN_STEPS, STEPS_PER_BIN, LatencyModel, LatencyState

Engine = Callable[[float], float]

SIZES = [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 180, 256]


# --- learning it ------------------------------------------------------------


def gpu(batch: float) -> float:
    return max(0.02, 0.02 * batch / 100)


def cpu(batch: float) -> float:
    return 0.001 + 0.004 * batch


def experts(batch: float) -> float:
    """A mixture of experts: more are needed at first, then all are."""
    return 0.01 + 0.01 * (1 - math.exp(-batch / 20)) + 0.00006 * batch


ENGINES = [gpu, cpu, experts]
UNSEEN: NDArray[np.float64] = np.unique(np.geomspace(1, 256, 150).round())


STALLS = (1.5, 2.0, 5.0, 100.0)
"""How much longer a contaminated step lasts. Only the shortest is usual, and counts in the mean of usual steps."""


def taught(
    model: LatencyModel,
    engine: Engine,
    steps: int,
    sizes: Sequence[int] = SIZES,
    noise: float = 0.05,
    contaminated: float = 0.0,
) -> LatencyModel:
    """After ``steps`` of each size, in any order; of the contaminated ones some last up to a hundred times as long."""
    rng = np.random.default_rng(len(sizes))
    for batch in rng.permuted(np.repeat(sizes, steps)).tolist():
        stall = float(rng.choice(STALLS)) if rng.random() < contaminated else 1.0
        model.observe(batch, engine(batch) * stall * float(np.exp(noise * rng.standard_normal())))
    return model


def known(model: LatencyModel) -> LatencyCurve:
    assert model.curve is not None
    return model.curve


def error(model: LatencyModel, engine: Engine, batches: Sequence[float] = tuple(UNSEEN)) -> float:
    """The largest relative one."""
    curve = known(model)
    return max(abs(curve.step_seconds(b) / engine(b) - 1) for b in batches)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("contaminated", [0.0, 0.2])
def test_the_curve_is_within_a_tenth_at_sizes_never_seen(engine: Engine, contaminated: float) -> None:
    with_short_stalls = 1 + contaminated / len(STALLS) * (STALLS[0] - 1)
    model = taught(LatencyModel(), engine, 60, contaminated=contaminated)
    assert error(model, lambda b: with_short_stalls * engine(b)) < 0.1


@pytest.mark.parametrize("engine", ENGINES)
def test_many_sizes_are_learned_as_well_as_few(engine: Engine) -> None:
    every = list(range(1, 257))
    assert error(taught(LatencyModel(), engine, 40, every, contaminated=0.2), engine) < 0.1


@pytest.mark.parametrize("engine", ENGINES)
def test_beyond_the_largest_size_the_slope_continues(engine: Engine) -> None:
    assert error(taught(LatencyModel(), engine, 60), engine, [300, 512, 1024]) < 0.15


@pytest.mark.parametrize(("engine", "sizes"), [(cpu, [16, 32, 64]), (gpu, [16, 32, 64]), (cpu, [40, 80])])
def test_below_the_smallest_size_the_slope_continues(engine: Engine, sizes: list[int]) -> None:
    model = taught(LatencyModel(), engine, 60, sizes, noise=0.0)
    assert error(model, engine, [4, 8, 12, 100]) < 0.1
    assert known(model).step_seconds(1) > 0


def test_steps_that_vary_count_by_their_mean() -> None:
    model, rng = LatencyModel(), np.random.default_rng(0)
    for batch in rng.permuted(np.repeat(SIZES, 60)).tolist():
        model.observe(batch, cpu(batch) * float(rng.choice([0.8, 1.0, 1.5])))
    assert error(model, lambda b: 1.1 * cpu(b)) < 0.07  # the median would be a tenth too low


def test_stalls_hardly_move_the_curve() -> None:
    model = taught(LatencyModel(), cpu, 60)
    before = known(model).step_seconds_array(UNSEEN)
    for batch in SIZES:
        for _ in range(3):
            model.observe(batch, 100 * cpu(batch))
    assert known(model).step_seconds_array(UNSEEN) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_an_engine_that_became_slower_or_faster_is_believed_soon(factor: float) -> None:
    model = taught(LatencyModel(), gpu, 200)
    model = taught(model, lambda b: factor * gpu(b), 50)
    assert error(model, lambda b: factor * gpu(b)) < 0.1


def test_a_slower_engine_is_believed_though_larger_batches_were_faster_before() -> None:
    model = taught(LatencyModel(), gpu, 60)
    model = taught(model, lambda b: 10 * gpu(b), 600, sizes=SIZES[:6])
    assert error(model, lambda b: 10 * gpu(b), SIZES[:6]) < 0.1
    assert known(model).step_seconds(256) >= known(model).step_seconds(8)


def test_there_is_no_curve_before_two_sizes_are_known() -> None:
    model = LatencyModel()
    assert model.curve is None
    for batch in (8, 15):  # too near to each other
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
    restored = LatencyState(**json.loads(json.dumps(asdict(model.state))))
    assert restored == model.state
    twin = LatencyModel(restored)
    assert twin.curve == model.curve
    assert taught(twin, gpu, 5).curve == taught(model, gpu, 5).curve


def test_the_state_stays_small() -> None:
    model = taught(LatencyModel(), cpu, 2 * STEPS_PER_BIN, sizes=range(1, 1025, 3))
    assert len(json.dumps(asdict(model.state))) < 50_000
    assert max(len(steps) for steps in model.state.seconds) == STEPS_PER_BIN


def test_an_empty_state_has_no_curve() -> None:
    assert LatencyModel(LatencyState()).curve is None
    assert LatencyModel().state == LatencyState()


@pytest.mark.parametrize(
    ("batches", "seconds", "ages", "message"),
    [
        (((1,),), ((0.1, 0.2),), (0,), "equally many"),
        (((1,),), ((0.1,),), (), "equally many"),
        (((),), ((),), (0,), "batches must be at least one, and of one bin"),
        (((1, 9),), ((0.1, 0.2),), (0,), "batches must be at least one, and of one bin"),
        (((0,),), ((0.1,),), (0,), "batches must be a whole number in"),
        (((1,),), ((-0.1,),), (0,), "seconds must be a number in"),
        (((1,),), ((0.1,),), (-1,), "ages must be a whole number in"),
        (((8,), (9,)), ((0.1,), (0.1,)), (0, 0), "one entry for each bin"),
    ],
)
def test_a_state_out_of_range_is_refused(
    batches: tuple[tuple[int, ...], ...], seconds: tuple[tuple[float, ...], ...], ages: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyState(batches, seconds, ages)


@pytest.mark.parametrize("batch", [0, -3, math.inf, math.nan])
def test_a_batch_out_of_range_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match="batch must be finite and at least 1"):
        LatencyModel().observe(batch, 0.1)


@pytest.mark.parametrize("seconds", [0.0, -0.1, math.inf, math.nan])
def test_seconds_out_of_range_are_refused(seconds: float) -> None:
    model = LatencyModel()
    with pytest.raises(ValueError, match="seconds must be finite and above 0"):
        model.observe(3, seconds)
    assert model.state == LatencyState()
