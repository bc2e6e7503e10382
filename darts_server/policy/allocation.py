"""How many candidates each prompt gets (DARTS, adaptive redundancy allocation), in a cohort, one at a time, under load.

Part a is the mean number of candidates per prompt (`cv_log_mean`). Part b shares it among prompts by the spread of
their lengths: `allocate` for a cohort, `ShadowPrice` for requests that come one at a time.

Under load extra candidates are given up before a request has to be refused (`Brownout`, an extension of ours), since
they shorten a group only if the engine has room for them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.checks import check_length, check_number

Floats = NDArray[np.float64]

CV_GAIN, CV_SCALE, CV_MAX = 1.5, 5.0, 1.75
"""Constants of the public code."""
WINDOW = 256
"""Requests that stand in for the cohort: a usual number of prompts a step."""
DEBT_HORIZON = 32
"""Requests over which a mean that is off its target is brought back. Short against the window, so that a stream that is
sorted by length is held as well; long against the noise of single requests."""
MAX_DEBT = 2**24
"""Far above what any group size allows: `DEBT_HORIZON` times its candidates."""
BROWNOUT_SHARE = 0.5
"""Share of the queue from which redundancy falls: a short peak passes without a change of the groups, and half of the
queue is left for what arrives until fewer candidates run."""
RELIEF = 0.5
"""Share of ``start`` by which the queue must be shorter on the way up than on the way down. Without this gap the scale
would flicker with every group that comes and goes."""


def cv_log_mean(std: float, mean: float, size: int) -> float:
    """Compute the mean candidates per prompt as the public code does: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``: mean length std within a prompt, averaged over the last steps; ``mean``: mean length of the last step; both
    in tokens, see `DatasetStats`. ``size``: M.
    """
    spread = CV_SCALE * std / mean
    return size * min(1 + CV_GAIN * math.log(spread), CV_MAX) if spread > 1 else float(size)


# --- prompts that come together ---------------------------------------------


def allocate_evenly(mean: float, groups: int, carried: float = 0.0) -> tuple[list[int], float]:
    """Compute whole numbers of candidates with this mean, as far as that goes.

    ``carried``: what earlier groups got too few. Returns the candidates of each group, and what is carried on.
    """
    counts = []
    for _ in range(groups):
        wanted = mean + carried
        counts.append(math.floor(wanted + 0.5))
        carried = wanted - counts[-1]
    return counts, carried


def allocate_by_std(stds: Sequence[float | None], *, budget: int, low: int, high: int) -> list[int]:
    """Compute the candidates of each prompt from its length std in tokens (its EMA).

    The weights are those of the paper's public code: (x - min + 1) / (max - min), all ones if all are equal. A prompt
    without a known std (``None``) takes the mean of the known ones; without any, all share evenly.
    """
    known = [x for x in stds if x is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    x = np.asarray([mean if std is None else std for std in stds], dtype=np.float64)
    spread = float(x.max() - x.min()) if x.size else 0.0
    # A spread too small to divide by is none. Only ratios of weights matter, and these tend to 1 as it vanishes.
    return allocate((x - x.min() + 1) / spread if spread > np.finfo(float).tiny else np.ones(x.size), budget, low, high)


def allocate(weights: Sequence[float] | Floats, budget: int, low: int, high: int) -> list[int]:
    """Compute the candidates of each prompt: the exact integer optimum of

        min sum_i w_i / m_i   subject to   sum_i m_i = budget,   low <= m_i <= high.

    The terms are convex in m_i, so giving one candidate at a time to the prompt with the largest gain w/m - w/(m + 1)
    is optimal: those with the largest gains of all are given out.

    ``weights``: above 0. ``budget``: candidates of all prompts together, clipped to [N * low, N * high]. Of two equal
    gains the prompt with fewer candidates comes first, then the one with the larger weight, then the earlier one. So a
    larger weight never gets fewer candidates, and equal weights share evenly. A million of N * (high - low) takes some
    60 ms and 17 MB.
    """
    w = np.asarray(weights, dtype=np.float64)
    extra = min(max(budget - low * w.size, 0), (high - low) * w.size)
    if not extra:
        return [low] * w.size
    m = np.arange(low, high)
    gains = w[:, None] / (m * (m + 1))  # of the candidate after the m-th
    last = np.partition(gains, gains.size - extra, axis=None)[gains.size - extra]  # gain of the last one given out
    counts = (gains > last).sum(axis=1)
    prompt, given = np.nonzero(gains == last)
    first = np.lexsort((prompt, -w[prompt], given))[: extra - int(counts.sum())]
    counts += low + np.bincount(prompt[first], minlength=w.size)
    return [int(count) for count in counts]


# --- requests that come one at a time ---------------------------------------


@dataclass(slots=True)
class ShadowPrice:
    """Candidates for requests that come one at a time. Plain fields: ``ShadowPrice(**json)`` restores it.

    The continuous optimum of the cohort's problem is m_i = clip(sqrt(w_i / mu), low, high), where the shadow price mu
    is the same for all prompts. So a single request can be allocated from mu alone, and the last `WINDOW` requests
    stand in for the cohort. Weights are the cohort's; their divisor is the same for all and goes into mu, so w is
    x - min + 1. And mu is the price at which the mean of m over them is the target. So a request gets what it would
    have got, before rounding, in a cohort with the requests before it.

    That keeps the mean only while new requests look like old ones. So the debt, what was given out too little or too
    much, moves the target of the next requests, and is made up within about `DEBT_HORIZON` of them. It cannot grow
    beyond what moves the target to a bound: whatever the stream, the mean of n requests is off by at most about
    `DEBT_HORIZON` * (high - low) / n.

    ``recent``: length stds of the last requests in tokens, oldest first. ``debt``: candidates that were given out too
    few (above zero) or too many so far. ``carry``: remainder of rounding, in [-0.5, 0.5).

    Raises:
        ValueError: a number is out of range.
    """

    recent: list[float] = field(default_factory=list)
    debt: float = 0.0
    carry: float = 0.0

    def __post_init__(self) -> None:
        check_length("recent", self.recent, WINDOW)
        for std in self.recent:
            check_number("recent", std)
        check_number("debt", self.debt, -MAX_DEBT, MAX_DEBT)
        check_number("carry", self.carry, -0.5, math.nextafter(0.5, 0))

    def candidates(self, std: float | None, target: float, low: int, high: int) -> int:
        """Allocate candidates to the next request by its prompt's length std in tokens.

        A prompt without a known std (``None``) takes the mean of the recent ones. ``target``: mean candidates per
        request. It and the bounds ``low`` and ``high`` may change between requests.
        """
        if std is not None:
            self.recent = [*self.recent, float(std)][-WINDOW:]
        stds = np.asarray(self.recent, dtype=np.float64)
        if std is None:
            stds = np.append(stds, math.fsum(self.recent) / len(self.recent) if self.recent else 0.0)
        # What the last of them would get, before rounding, if all were one cohort. With s = 1 / sqrt(mu), the mean of
        # clip(s * root, low, high) is a piecewise linear, increasing function of s, whose slope changes where a root
        # leaves `low` and where it reaches `high`. So its sums at these points are computed, and the target is
        # interpolated between them.
        roots = np.sqrt(stds - stds.min() + 1)
        wanted = min(max(target + self.debt / DEBT_HORIZON, low), high)
        bends = np.concatenate([low / roots, high / roots])
        order = np.argsort(bends)
        bends = bends[order]
        slopes = np.cumsum(np.concatenate([roots, -roots])[order])[:-1]
        sums = low * roots.size + np.concatenate([[0.0], np.cumsum(slopes * np.diff(bends))])
        scale = float(np.interp(wanted * roots.size, sums, bends))
        share = min(max(scale * float(roots[-1]), low), high)
        # The remainder of rounding is added to the next request's share, so the mean is kept.
        m = min(max(math.floor(share + self.carry + 0.5), low), high)
        self.carry = min(max(self.carry + share - m, -0.5), math.nextafter(0.5, 0))
        self.debt += target - m
        return m


# --- under load -------------------------------------------------------------


class Brownout:
    """The share of redundancy that is left, from 1 (all of it) to 0 (none), by the number of waiting candidates.

    It falls linearly from ``start`` waiting candidates to ``end``, where it is 0. If ``end`` is not above ``start``, it
    stays 1.
    """

    def __init__(self, start: float, end: float) -> None:
        self._start = start
        self._end = end
        self.scale = 1.0

    @classmethod
    def for_queue(cls, max_waiting: int, capacity: int, share: float = BROWNOUT_SHARE) -> "Brownout":
        """Start at ``share`` of ``max_waiting``, but not while fewer wait than the engine runs at once."""
        return cls(max(share * max_waiting, capacity), max_waiting)

    def scale_at(self, waiting: int) -> float:
        """Return the scale for so many waiting candidates. Nothing changes."""
        if self._end <= self._start:
            return 1.0
        width = self._end - self._start
        least = (self._end - (waiting + RELIEF * self._start)) / width
        greatest = min(max((self._end - waiting) / width, 0.0), 1.0)
        return min(max(self.scale, least), greatest)

    def update(self, waiting: int) -> float:
        """Store and return the scale for so many waiting candidates. It decides how the scale rises again."""
        self.scale = self.scale_at(waiting)
        return self.scale


def reduce_candidates(candidates: int, size: int, scale: float) -> int:
    """Return a group's candidates at this ``scale``, never fewer than its ``size``; rounded half up."""
    return size + math.floor((candidates - size) * scale + 0.5)
