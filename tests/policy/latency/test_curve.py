"""The latency curve, and the time of a rollout by the paper's cost model."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.latency.curve import LatencyCurve

FLAT = LatencyCurve((1.0,), (0.02,))


PROPORTIONAL = LatencyCurve((1.0,), (0.004,), 0.004)


BENT = LatencyCurve((1.0, 4.0, 8.0), (0.02, 0.02, 0.04), 0.005)


CURVES = st.sampled_from([FLAT, PROPORTIONAL, BENT])


def simulated(lengths: Sequence[int], capacity: int, curve: LatencyCurve) -> float:
    """One step after the other; the one that waits longest takes a free place."""
    waiting, running, seconds = [x for x in lengths if x], list[int](), 0.0
    while waiting or running:
        while waiting and len(running) < capacity:
            running.append(waiting.pop(0))
        seconds += curve.step_seconds(len(running))
        running = [left - 1 for left in running if left > 1]
    return seconds


def test_the_curve_is_linear_between_its_points_and_extrapolated_beyond_them() -> None:
    assert [BENT.step_seconds(b) for b in (0.3, 1, 2, 4, 6, 8, 10)] == pytest.approx(
        [0.02, 0.02, 0.02, 0.02, 0.03, 0.04, 0.05]
    )


def test_an_array_gives_the_values_of_its_elements() -> None:
    batches = np.asarray([[0.5, 3.0, 5.0], [7.5, 8.0, 900.0]])
    expected = [[BENT.step_seconds(b) for b in row] for row in batches.tolist()]
    assert BENT.step_seconds_array(batches).tolist() == expected


@pytest.mark.parametrize("curve", [FLAT, PROPORTIONAL, BENT])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_servers_that_share_sequences_evenly_take_the_time_of_one_with_its_share(
    curve: LatencyCurve, servers: int
) -> None:
    shared, lengths = curve.shared_by(servers), np.repeat([7.0, 3.0, 40.0, 12.0, 1.0, 25.0], servers)[None]
    for batch in (0.3, 1, 3, 4, 7, 8, 30):
        assert shared.step_seconds(servers * batch) == pytest.approx(curve.step_seconds(batch))
    assert shared.rollout_seconds_batch(lengths)[0] == pytest.approx(curve.rollout_seconds([7, 3, 40, 12, 1, 25]))


def test_a_curve_survives_json() -> None:
    assert LatencyCurve(**json.loads(json.dumps(asdict(BENT)))) == BENT


@pytest.mark.parametrize(
    ("batches", "seconds", "per_sequence", "message"),
    [
        ((), (), 0.0, "equally many, and at least one"),
        ((1.0, 2.0), (0.1,), 0.0, "equally many, and at least one"),
        ((0.0,), (0.1,), 0.0, "batches must be finite and above 0"),
        ((1.0,), (0.0,), 0.0, "seconds must be finite and above 0"),
        ((1.0,), (math.nan,), 0.0, "seconds must be finite and above 0"),
        ((2.0, 2.0), (0.1, 0.2), 0.0, "batches must increase"),
        ((1.0, 2.0), (0.2, 0.1), 0.0, "seconds must not decrease"),
        ((1.0,), (0.1,), -0.1, "per_sequence must be finite and at least 0"),
        ((1.0,), (0.1,), math.inf, "per_sequence must be finite and at least 0"),
    ],
)
def test_a_curve_out_of_range_is_refused(
    batches: tuple[float, ...], seconds: tuple[float, ...], per_sequence: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyCurve(batches, seconds, per_sequence)


def test_the_cost_model_is_the_papers() -> None:
    by_hand = 2 * BENT.step_seconds(3) + (7 - 2) * BENT.step_seconds(2) + (9 - 7) * BENT.step_seconds(1)
    assert BENT.rollout_seconds([7, 2, 9]) == pytest.approx(by_hand)
    assert BENT.rollout_seconds([]) == 0


@given(st.lists(st.integers(0, 12), max_size=12), CURVES)
def test_without_a_capacity_all_run_from_the_start(lengths: list[int], curve: LatencyCurve) -> None:
    assert curve.rollout_seconds(lengths) == pytest.approx(simulated(lengths, len(lengths), curve))


@given(st.lists(st.integers(0, 12), max_size=25), st.integers(1, 8), CURVES)
def test_beyond_the_capacity_they_queue_in_order_of_arrival(
    lengths: list[int], capacity: int, curve: LatencyCurve
) -> None:
    assert curve.rollout_seconds(lengths, capacity) == pytest.approx(simulated(lengths, capacity, curve))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 30))
def test_with_flat_steps_the_longest_decides_with_proportional_ones_the_sum(lengths: list[int], capacity: int) -> None:
    assert FLAT.rollout_seconds(lengths) == pytest.approx(0.02 * max(lengths))
    assert PROPORTIONAL.rollout_seconds(lengths) == pytest.approx(0.004 * sum(lengths))
    assert PROPORTIONAL.rollout_seconds(lengths, capacity) == pytest.approx(0.004 * sum(lengths))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 5), CURVES)
def test_a_weight_counts_a_length_several_times(lengths: list[int], weight: int, curve: LatencyCurve) -> None:
    model = curve.rollout_seconds_batch(np.asarray([lengths], dtype=np.float64), weight=weight)
    assert model[0] == pytest.approx(curve.rollout_seconds(lengths * weight))


@pytest.mark.parametrize("capacity", [10, 64, 300])
def test_a_scale_model_scales_the_queue_too(capacity: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.5, (1, 400))
    model = float(BENT.rollout_seconds_batch(lengths, capacity, weight=6.0)[0])
    full = BENT.rollout_seconds(np.tile(lengths[0], 6).tolist(), capacity)
    assert model == pytest.approx(full, rel=0.04)


def test_a_batch_of_rollouts_equals_each_alone() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, (5, 30))
    for capacity in (None, 7):
        alone = [BENT.rollout_seconds(row, capacity) for row in lengths.tolist()]
        assert BENT.rollout_seconds_batch(lengths, capacity).tolist() == pytest.approx(alone)


def test_lengths_and_capacities_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths must be finite and at least 0"):
        FLAT.rollout_seconds([3, -1])
    with pytest.raises(ValueError, match="lengths must be finite and at least 0"):
        FLAT.rollout_seconds([math.inf])
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        FLAT.rollout_seconds([3], 0)
