"""Learn the time of a decode step by batch size while the engine runs.

PTL(b), the paper's per-token latency, is a property of model, engine and machine: flat and then linear on a GPU, nearly
linear from the start on a CPU, bent where a larger batch activates more experts, in stairs where batches are padded. So
no formula is fitted. `LatencyModel` keeps recent steps by batch size, takes the mean of the usual ones, and makes these
monotone (isotonic regression of logarithms, so that errors are relative). `LatencyCurve` interpolates between them.

With 5 % noise, a fifth of the steps delayed up to a hundredfold and all batch sizes seen, it is off by 1 % on average
and 5 to 8 % at worst (three kinds of engine, which the tests have). A line with one bend, fitted to such points of nine
kinds of engine, was off by 5 % and 17 %, since some engines' curves bend the other way.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from statistics import fmean, linear_regression, median
from typing import Any

import numpy as np

from darts_server.estimates.checks import LARGEST, check_count, check_length, check_number
from darts_server.estimates.isotonic import Floats, fit_isotonic

BINS_PER_OCTAVE = 4
"""Batch sizes within a fifth of each other share a bin. A bend between two bins is cut off by 4 % at most."""
STEPS_PER_BIN = 64
"""Enough to average the noise; and when the engine becomes faster or slower, 40 new steps outvote the old ones."""
TYPICAL, USUAL = 0.4, 1.75
"""Steps that differ from this quantile by more than the factor `USUAL` are left out: those that wait for other work,
such as a pause or a part of a long prefill, and those of an engine that has become slower or faster. If one step in
five is delayed, the quantile is the median of the others. The mean of what is left counts: a rollout lasts as long as
its steps do together, and what often delays them a little is part of it."""
MIN_STEPS = 12
"""Steps that a bin needs to count: if one in five is hit, so many have a hit typical step one time in two thousand."""
SPREAD = 2.0
"""Factor between the smallest and the largest known batch size below which the slope is mostly noise."""
HALF_LIFE = 256
"""Steps after which a bin that was not seen again counts for half where it contradicts others."""
SECONDS = (1e-9, 1e6)
"""Range of a step's seconds, so that neither sums nor logarithms of them leave the range of floats."""
DIGITS = 5
"""Of seconds that are kept: the noise is far larger, and the state is a third of the size."""
MAX_STARTS = 128
"""Steps with starts that are kept. A batch has a few to some dozen, more where sequences start one by one."""
MIN_STARTS = 12
"""Steps with starts before the cost is known: if one in five is hit by other work, the median of so many rarely is."""
MAX_WEIGHT = 0.125
"""Of all starts, as which those of one step count at most."""

Start = tuple[int, int, float]
"""A step: how many sequences got a token in it, for how many of these it was the first, and its seconds."""


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """PTL(b): seconds of one decode step while b sequences run, linear between the points (``batches``, ``seconds``).

    Below the first point it is constant; beyond the last it rises by ``per_sequence`` seconds a sequence. Batches
    increase, and seconds never fall.
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]
    per_sequence: float = 0.0

    def scaled(self, weight: float) -> "LatencyCurve":
        """Return the curve for sequences of which each stands for ``weight``."""
        batches = tuple(batch / weight for batch in self.batches)
        return LatencyCurve(batches, self.seconds, weight * self.per_sequence)

    def step_seconds(self, batch: float) -> float:
        """Return the seconds of one decode step while ``batch`` sequences run."""
        return float(self.step_seconds_array(np.asarray(batch, dtype=np.float64)))

    def step_seconds_array(self, batches: Floats) -> Floats:
        """Return the seconds of one decode step for each of ``batches``, an array of any shape."""
        beyond = self.per_sequence * np.maximum(batches - self.batches[-1], 0.0)
        return np.asarray(np.interp(batches, self.batches, self.seconds) + beyond, dtype=np.float64)

    def rollout_seconds(self, lengths: Sequence[float], capacity: int | None = None) -> float:
        """Return the seconds until all ``lengths`` are generated, as `completion_seconds` has them; 0 without any."""
        return float(self.completion_seconds(lengths, capacity).max(initial=0.0))

    def completion_seconds(self, lengths: Sequence[float], capacity: int | None = None) -> Floats:
        """Return the seconds until each of the ``lengths`` (tokens, in order of arrival) is generated.

        All start together, and each running sequence gets a token in each step. With the lengths l in ascending order,
        M' of them: the last one takes the sum over m of (l_m - l_(m-1)) PTL(M' - m + 1), as in the paper. If the engine
        runs at most ``capacity`` sequences at once, the others queue in order of arrival, and one starts whenever one
        ends.
        """
        ends = [float(length) for length in lengths]
        running = np.arange(len(ends), 0, -1, dtype=np.float64)
        if capacity is not None and len(ends) > capacity:
            # Each queued sequence starts with the step after the first end of those that run.
            places = ends[:capacity]
            heapify(places)
            for index in range(capacity, len(ends)):
                ends[index] += places[0]
                heapreplace(places, ends[index])
            running = np.minimum(running, capacity)
        order = np.argsort(ends, kind="stable")
        steps = np.diff(np.asarray(ends)[order], prepend=0.0)
        seconds = np.empty(len(ends))
        seconds[order] = np.cumsum(steps * self.step_seconds_array(running))
        return seconds


def start_seconds(steps: Collection[Start], curve: LatencyCurve) -> float | None:
    """Return the seconds by which each sequence that starts lengthens its step; ``None`` before `MIN_STARTS` steps.

    They are prefilled, and the API process hands them to the engine one after the other. On a real engine 64 to 128
    sequences that were submitted together got their first tokens within two to four steps, which took the longer the
    more started in them; and about as much was added for each where one took the place of another. So the cost is a
    number of seconds for each start, and no delay that passes beside the decoding of others.

    What a step takes beyond the decode curve, which is learned from other steps, is due to the n sequences that start
    in it. Least absolute deviations fit the cost of one, which is the median of (seconds beyond the curve) / n,
    weighted by n. Least squares would follow the largest stall. So would a median if the step that stalled had most of
    the starts, as after a pause; therefore no step has more than `MAX_WEIGHT` of all weight.

    What prefills take is in it as an average. A prefill that is split over several steps counts only as far as the last
    of them, and the first step of an engine that was idle does not count, since nothing says when it began.
    """
    if len(steps) < MIN_STARTS:
        return None
    most = MAX_WEIGHT * sum(started for _, started, _ in steps)
    costs = sorted(
        ((seconds - curve.step_seconds(batch)) / started, min(started, most)) for batch, started, seconds in steps
    )
    passed = list(accumulate(weight for _, weight in costs))
    return max(0.0, costs[bisect_left(passed, passed[-1] / 2)][0])


class LatencyModel:
    """PTL(b) from the engine's decode steps, in any order, and from other steps what a sequence costs that starts.

    A stall hardly moves it, and an engine that has become slower or faster is believed after some forty steps of a
    batch size. Batch sizes that were not seen since are overruled where they would make the curve fall.

    ``LatencyModel(**state)`` continues from a `state`. It has an entry for each bin of batch sizes: ``batches`` and
    ``seconds`` of its last steps, oldest first, and ``ages``: how many steps of all sizes ago it was last seen.
    ``starts``: the last steps in which sequences started.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[int]] = (),
        seconds: Sequence[Sequence[float]] = (),
        ages: Sequence[int] = (),
        starts: Sequence[Start] = (),
    ) -> None:
        self._steps = 0
        self._bins: dict[int, deque[tuple[int, float]]] = {}  # last steps with about the same batch size: it, seconds
        self._last_step: dict[int, int] = {}  # number of the latest step of each bin
        if [*map(len, batches)] != [*map(len, seconds)] or len(ages) != len(seconds):
            raise ValueError("batches, seconds and ages must be equally many")
        for sizes, times, age in zip(batches, seconds, ages, strict=True):
            check_length("batches", sizes, STEPS_PER_BIN)
            for size, time in zip(sizes, times, strict=True):
                check_count("batches", size, 1)
                check_number("seconds", time, *SECONDS)
            check_count("ages", age)
            bins = set(map(_bin_index, sizes))
            if len(bins) != 1 or not bins.isdisjoint(self._bins):
                raise ValueError(f"batches must be at least one, and of one bin that has no other entry, got {sizes}")
            [index] = bins
            self._bins[index] = deque(zip(sizes, times, strict=True), STEPS_PER_BIN)
            self._last_step[index] = -age
        check_length("starts", starts, MAX_STARTS)
        for batch, started, time in starts:
            check_count("starts", started, 1)
            check_count("starts", batch, started)
            check_number("starts", time, *SECONDS)
        self._starts = deque(starts, MAX_STARTS)
        self._curve: LatencyCurve | None = None
        self._start_seconds: float | None = None
        self._is_fitted = not self._bins

    @property
    def state(self) -> dict[str, Any]:
        """JSON values."""
        batches, seconds, ages = [], [], []
        for index, steps in sorted(self._bins.items()):
            sizes, times = zip(*steps, strict=True)
            batches.append(sizes)
            seconds.append(times)
            ages.append(min(self._steps - self._last_step[index], LARGEST))
        return {"batches": batches, "seconds": seconds, "ages": ages, "starts": [*self._starts]}

    def observe(self, batch: int, seconds: float, started: int = 0) -> None:
        """Record one step, which took ``seconds`` while ``batch`` sequences ran, of which so many ``started`` in it.

        Raises:
            ValueError: ``batch`` is below 1 or ``seconds`` not above 0, or one of them is not finite, or ``started`` is
                not from 0 to ``batch``.
        """
        if not (math.isfinite(batch) and batch >= 1):
            raise ValueError(f"batch must be finite and at least 1, got {batch}")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds must be finite and above 0, got {seconds}")
        if not 0 <= started <= batch:
            raise ValueError(f"started must be from 0 to the batch, {batch}, got {started}")
        seconds = float(f"{min(max(seconds, SECONDS[0]), SECONDS[1]):.{DIGITS}g}")
        self._is_fitted = False
        if started:
            self._starts.append((batch, started, seconds))
            return
        index = _bin_index(batch)
        self._steps += 1
        self._last_step[index] = self._steps
        self._bins.setdefault(index, deque(maxlen=STEPS_PER_BIN)).append((batch, seconds))

    @property
    def curve(self) -> LatencyCurve | None:
        """The curve as learned so far.

        ``None`` until there have been `MIN_STEPS` steps each of two batch sizes that differ by a factor of `SPREAD`.
        """
        self._fit_new()
        return self._curve

    @property
    def start_seconds(self) -> float | None:
        """`start_seconds` of the steps so far; ``None`` while not known."""
        self._fit_new()
        return self._start_seconds

    def _fit_new(self) -> None:
        """Fit both if a step was recorded since."""
        if not self._is_fitted:
            self._curve = self._fit()
            self._start_seconds = None if self._curve is None else start_seconds(self._starts, self._curve)
            self._is_fitted = True

    def _fit(self) -> LatencyCurve | None:
        points = []
        for index, steps in self._bins.items():
            if len(steps) < MIN_STEPS:
                continue
            # Within a bin, a step is taken to last as long as the root of its batch: half-way between flat and
            # proportional.
            batch = median(size for size, _ in steps)
            ordered = sorted(seconds / math.sqrt(size) for size, seconds in steps)
            typical = ordered[round(TYPICAL * (len(ordered) - 1))]
            usual = ordered[bisect_left(ordered, typical / USUAL) : bisect_right(ordered, typical * USUAL)]
            weight = len(steps) * math.exp2((self._last_step[index] - self._steps) / HALF_LIFE)
            points.append((batch, fmean(usual) * math.sqrt(batch), max(weight, 1e-12)))
        points.sort()
        if not points or points[-1][0] < SPREAD * points[0][0]:
            return None
        batches, raw, weights = (list(column) for column in zip(*points, strict=True))
        seconds = [math.exp(x) for x in fit_isotonic([math.log(x) for x in raw], weights)]
        # Extrapolate with the slope of the adjacent octave. The bound: one more sequence never costs more than the mean
        # of those that run. No engine is that bad, but the slope of a few noisy points may be.
        first = max(2, bisect_right(batches, SPREAD * batches[0]))
        last = min(len(batches) - 2, bisect_left(batches, batches[-1] / SPREAD))
        below = linear_regression(batches[:first], seconds[:first]).slope
        below = min(max(below, 0.0), seconds[0] / batches[0])
        above = linear_regression(batches[last:], seconds[last:]).slope
        above = min(max(above, 0.0), seconds[-1] / batches[-1])
        if batches[0] > 1:
            seconds.insert(0, seconds[0] - below * (batches[0] - 1))
            batches.insert(0, 1)
        return LatencyCurve(tuple(batches), tuple(seconds), above)


def _bin_index(batch: int) -> int:
    return int(BINS_PER_OCTAVE * math.log2(batch))
