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


@given(st.lists(st.integers(0, 12), max_size=25), st.none() | st.integers(1, 8), CURVES)
def test_trajectories_beyond_the_capacity_queue_in_order_of_arrival(
    lengths: list[int], capacity: int | None, curve: LatencyCurve
) -> None:
    expected = simulated(lengths, capacity or len(lengths), curve)
    assert rollout_seconds(curve, lengths, capacity) == pytest.approx(expected)
