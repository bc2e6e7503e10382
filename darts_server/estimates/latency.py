"""Learn the time of a decode step by batch size while the engine runs.

PTL(b), the paper's per-token latency, is flat and then linear on a GPU, nearly linear on a CPU, bends where a larger
batch activates more experts, and has stairs where batches are padded. So no formula is fitted: `LatencyModel` takes
means of usual steps by batch size, and makes them monotone (isotonic regression of logarithms). `LatencyCurve`
interpolates.

With 5 % noise and a fifth of the steps delayed, the curve is off by 1 % on average and by 8 % at worst. A line with a
bend was off by 5 % and 17 %.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import fmean, linear_regression, median
from typing import Any

import numpy as np

from darts_server.estimates.checks import LARGEST, check_count, check_length, check_number
from darts_server.estimates.isotonic import Floats, fit_isotonic

BINS_PER_OCTAVE = 4
"""Batch sizes within a fifth share a bin. A bend is cut off by 4 % at most."""
STEPS_PER_BIN = 64
"""Enough to average the noise. When the engine changes, 40 new steps outvote the old steps."""
TYPICAL_QUANTILE = 0.4
"""Quantile of a bin's steps that counts as typical: the median of the others if one step in five is delayed."""
MAX_DEVIATION = 1.75
"""Steps that differ from the typical step by more than this factor are left out: they wait for other work, such as a
part of a long prefill, or are older than a change of the engine. The others count by their mean, with small delays."""
MIN_STEPS = 12
"""Steps that a bin needs to count. If one in five is delayed, the typical step of 12 is delayed once in 2,000."""
MIN_BATCH_RATIO = 2.0
"""Factor between the smallest and the largest batch size below which the slope is mostly noise."""
HALF_LIFE = 256
"""Steps after which a bin without new steps has half the weight against other bins."""
SECONDS_RANGE = (1e-9, 1e6)
"""Accepted seconds of a step: sums and logarithms stay in the range of floats."""
SIGNIFICANT_DIGITS = 5
"""With fewer digits of seconds, the state is a third of the size."""
MAX_STARTS = 128
"""Number of kept steps with starts. A batch has a few to some dozens."""
MIN_STARTS = 12
"""Steps with starts before their cost is known. If a fifth of them is delayed, the median rarely is."""
MAX_WEIGHT = 0.125
"""Largest share of all starts that one step has in the median."""

Start = tuple[int, int, float]
"""A step with starts: its batch size, the number of sequences whose first token it generated, and its seconds."""


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """PTL(b): seconds of a decode step while b sequences run, linear between the points (``batches``, ``seconds``).

    Below the first point the curve is constant. Beyond the last point it rises by ``per_sequence`` seconds a sequence.
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    per_sequence: float = 0.0

    def scaled(self, weight: float) -> "LatencyCurve":
        """Return the curve for sequences that stand for ``weight`` sequences each."""
        batches = tuple(batch / weight for batch in self.batches)
        return LatencyCurve(batches, self.seconds, weight * self.per_sequence)

    def step_seconds(self, batch: float) -> float:
        return float(self.step_seconds_array(np.asarray(batch, dtype=np.float64)))

    def step_seconds_array(self, batches: Floats) -> Floats:
        beyond = self.per_sequence * np.maximum(batches - self.batches[-1], 0.0)
        return np.asarray(np.interp(batches, self.batches, self.seconds) + beyond, dtype=np.float64)

    def completion_seconds(self, lengths: Sequence[float], capacity: int | None = None) -> Floats:
        """Return the seconds until each of the ``lengths`` (tokens, in order of arrival) is generated.

        All sequences start together. For M' ascending lengths l, the last sequence takes the sum over m of
        (l_m - l_(m-1)) PTL(M' - m + 1), as in the paper. Sequences beyond ``capacity`` queue.
        """
        # The decode step at which each sequence ends. Before the k-th end, all but k - 1 sequences run.
        end_steps = [float(length) for length in lengths]
        num_running = np.arange(len(end_steps), 0, -1, dtype=np.float64)
        if capacity is not None and len(end_steps) > capacity:
            # A queued sequence starts when the first running sequence has ended.
            running_ends = end_steps[:capacity]
            heapify(running_ends)
            for index in range(capacity, len(end_steps)):
                end_steps[index] += running_ends[0]
                heapreplace(running_ends, end_steps[index])
            num_running = np.minimum(num_running, capacity)

        order = np.argsort(end_steps, kind="stable")
        steps_between_ends = np.diff(np.asarray(end_steps)[order], prepend=0.0)
        seconds = np.empty(len(end_steps))
        seconds[order] = np.cumsum(steps_between_ends * self.step_seconds_array(num_running))
        return seconds


def start_seconds(steps: Collection[Start], curve: LatencyCurve) -> float | None:
    """Return the seconds that each start adds to its step, or None before `MIN_STARTS` steps.

    The n starts of a step share its seconds beyond the decode curve, prefills included. The result is the median of
    these shares over steps, weighted by n, because a mean would follow the largest stall. `MAX_WEIGHT` limits the
    weights, because a stalled step may have most of the starts, as after a pause.
    """
    if len(steps) < MIN_STARTS:
        return None
    batches, started, seconds = np.asarray([*steps], dtype=np.float64).T
    seconds_per_start = (seconds - curve.step_seconds_array(batches)) / started
    # The weighted median.
    weights = np.minimum(started, MAX_WEIGHT * started.sum())
    order = np.argsort(seconds_per_start)
    cumulative_weights = np.cumsum(weights[order])
    middle = np.searchsorted(cumulative_weights, cumulative_weights[-1] / 2)
    return max(0.0, float(seconds_per_start[order[middle]]))


class LatencyModel:
    """Learns PTL(b) from decode steps, and the cost of a start from steps with starts.

    ``LatencyModel(**state)`` restores a saved state.

    Args:
        batches, seconds: latest steps of each bin of batch sizes, oldest first.
        ages: number of steps since the latest step of each bin.
        starts: latest steps with starts.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[int]] = (),
        seconds: Sequence[Sequence[float]] = (),
        ages: Sequence[int] = (),
        starts: Sequence[Start] = (),
    ) -> None:
        self._steps = 0
        # The latest (batch size, seconds) of each bin of batch sizes, and the number of its latest step.
        self._bins: dict[int, deque[tuple[int, float]]] = {}
        self._last_step: dict[int, int] = {}
        if [*map(len, batches)] != [*map(len, seconds)] or len(ages) != len(seconds):
            raise ValueError("batches, seconds and ages must be equally many")
        for sizes, times, age in zip(batches, seconds, ages, strict=True):
            check_length("batches", sizes, STEPS_PER_BIN)
            for size, time in zip(sizes, times, strict=True):
                check_count("batches", size, 1)
                check_number("seconds", time, *SECONDS_RANGE)
            check_count("ages", age)
            bins = {_bin_index(size) for size in sizes}
            if len(bins) != 1 or not bins.isdisjoint(self._bins):
                raise ValueError(f"batches must be at least one, and of one bin that has no other entry, got {sizes}")
            [index] = bins
            self._bins[index] = deque(zip(sizes, times, strict=True), STEPS_PER_BIN)
            self._last_step[index] = -age

        check_length("starts", starts, MAX_STARTS)
        for batch, started, time in starts:
            check_count("starts", started, 1)
            check_count("starts", batch, started)
            check_number("starts", time, *SECONDS_RANGE)
        self._starts = deque(starts, MAX_STARTS)
        self._curve: LatencyCurve | None = None
        self._is_fitted = False

    @property
    def state(self) -> dict[str, Any]:
        batches = []
        seconds = []
        ages = []
        for index, steps in sorted(self._bins.items()):
            sizes, times = zip(*steps, strict=True)
            batches.append(sizes)
            seconds.append(times)
            ages.append(min(self._steps - self._last_step[index], LARGEST))
        return {"batches": batches, "seconds": seconds, "ages": ages, "starts": [*self._starts]}

    def observe(self, batch: int, seconds: float, started: int = 0) -> None:
        """Record a step of ``seconds`` with ``batch`` running sequences; ``started`` of them got their first token.

        The first step of an idle engine must be left out, since nothing shows when it began.

        Raises:
            ValueError: a number is not finite or out of range.
        """
        if not (math.isfinite(batch) and batch >= 1):
            raise ValueError(f"batch must be finite and at least 1, got {batch}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be finite and above 0, got {seconds}")
        if not 0 <= started <= batch:
            raise ValueError(f"started must be from 0 to the batch, {batch}, got {started}")
        shortest, longest = SECONDS_RANGE
        # Rounded, so that the saved state is short.
        seconds = float(f"{min(max(seconds, shortest), longest):.{SIGNIFICANT_DIGITS}g}")
        # A step with starts includes prefills, so it says nothing about the curve.
        if started:
            self._starts.append((batch, started, seconds))
            return
        index = _bin_index(batch)
        self._steps += 1
        self._last_step[index] = self._steps
        self._bins.setdefault(index, deque(maxlen=STEPS_PER_BIN)).append((batch, seconds))
        self._is_fitted = False

    @property
    def curve(self) -> LatencyCurve | None:
        """None until two batch sizes that differ by a factor of `MIN_BATCH_RATIO` have `MIN_STEPS` steps each."""
        if not self._is_fitted:
            self._curve = self._fit()
            self._is_fitted = True
        return self._curve

    @property
    def start_seconds(self) -> float | None:
        if self.curve is None:
            return None
        return start_seconds(self._starts, self.curve)

    def _fit(self) -> LatencyCurve | None:
        points = []
        for index, steps in self._bins.items():
            if len(steps) < MIN_STEPS:
                continue
            # A point is the median batch and the usual seconds of a bin. Within a bin, seconds are assumed to grow as
            # the root of the batch: between flat and proportional.
            batch = median(size for size, _ in steps)
            scaled_seconds = sorted(seconds / math.sqrt(size) for size, seconds in steps)
            typical = scaled_seconds[round(TYPICAL_QUANTILE * (len(scaled_seconds) - 1))]
            first = bisect_left(scaled_seconds, typical / MAX_DEVIATION)
            end = bisect_right(scaled_seconds, typical * MAX_DEVIATION)
            usual_seconds = fmean(scaled_seconds[first:end]) * math.sqrt(batch)
            # A bin without new steps loses weight. Isotonic regression needs weights above 0.
            age = self._steps - self._last_step[index]
            weight = max(len(steps) * math.exp2(-age / HALF_LIFE), 1e-12)
            points.append((batch, usual_seconds, weight))
        points.sort()
        if not points or points[-1][0] < MIN_BATCH_RATIO * points[0][0]:
            return None

        # Seconds must not fall as batches grow.
        batches = [batch for batch, _, _ in points]
        logarithms = fit_isotonic([math.log(time) for _, time, _ in points], [weight for _, _, weight in points])
        seconds = [math.exp(logarithm) for logarithm in logarithms]

        # Extrapolate with the slope of the adjacent octave. One more sequence costs at most the mean of the running
        # sequences: the slope of a few noisy points may be steeper, but no engine is.
        # An octave counts at least two points.
        octave_end = max(2, bisect_right(batches, MIN_BATCH_RATIO * batches[0]))
        slope_below = linear_regression(batches[:octave_end], seconds[:octave_end]).slope
        slope_below = min(max(slope_below, 0.0), seconds[0] / batches[0])
        octave_start = min(len(batches) - 2, bisect_left(batches, batches[-1] / MIN_BATCH_RATIO))
        slope_above = linear_regression(batches[octave_start:], seconds[octave_start:]).slope
        slope_above = min(max(slope_above, 0.0), seconds[-1] / batches[-1])
        if batches[0] > 1:
            seconds.insert(0, seconds[0] - slope_below * (batches[0] - 1))
            batches.insert(0, 1)
        return LatencyCurve(tuple(batches), tuple(seconds), slope_above)


def _bin_index(batch: int) -> int:
    return int(BINS_PER_OCTAVE * math.log2(batch))
