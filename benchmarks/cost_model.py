"""Seconds of a rollout from the lengths of its trajectories, by the cost model of the paper."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np

from darts_server.policy.latency import LatencyCurve


def rollout_seconds(curve: LatencyCurve, lengths: Sequence[float], capacity: int | None = None) -> float:
    """Return the seconds until all ``lengths`` (tokens, in order of arrival) are generated.

    All start together, each running one gets a token a step, and a step takes as long as the ``curve`` says:
    T = sum over m of (l_[m] - l_[m-1]) PTL(M' - m + 1), lengths ascending. If the engine runs at most ``capacity``
    sequences at once, the others queue in order of arrival: one starts whenever one finishes.
    """
    queued, left = 0.0, list(lengths)
    if capacity is not None and len(left) > capacity:
        # All places are taken until the last sequence starts.
        left = left[:capacity]
        heapify(left)
        for length in lengths[capacity:]:
            queued = heapreplace(left, left[0] + length)
        left = [end - queued for end in left]
    steps = np.asarray([later - earlier for earlier, later in pairwise([0.0, *sorted(left)])])
    running = np.arange(len(left), 0, -1, dtype=np.float64)
    full = queued * curve.step_seconds(capacity) if capacity is not None else 0.0
    return full + float((steps * curve.step_seconds_array(running)).sum())
