"""Seconds of a rollout by the paper's cost model."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cost_model import rollout_seconds
from darts_server.policy.latency import LatencyCurve

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


def test_the_cost_model_is_the_papers() -> None:
    by_hand = 2 * BENT.step_seconds(3) + (7 - 2) * BENT.step_seconds(2) + (9 - 7) * BENT.step_seconds(1)
    assert rollout_seconds(BENT, [7, 2, 9]) == pytest.approx(by_hand)
    assert rollout_seconds(BENT, []) == 0


@given(st.lists(st.integers(0, 12), max_size=12), CURVES)
def test_without_a_capacity_all_run_from_the_start(lengths: list[int], curve: LatencyCurve) -> None:
    assert rollout_seconds(curve, lengths) == pytest.approx(simulated(lengths, len(lengths), curve))


@given(st.lists(st.integers(0, 12), max_size=25), st.integers(1, 8), CURVES)
def test_beyond_the_capacity_they_queue_in_order_of_arrival(
    lengths: list[int], capacity: int, curve: LatencyCurve
) -> None:
    assert rollout_seconds(curve, lengths, capacity) == pytest.approx(simulated(lengths, capacity, curve))
