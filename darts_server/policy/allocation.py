"""How many candidates each prompt gets (DARTS, adaptive redundancy allocation), in a cohort, one at a time, under load.

Part a is the mean number of candidates per prompt (`cv_log_mean`). Part b shares it among prompts by the spread of
their lengths: `allocate` for a cohort, `ShadowPrice` for requests that come one at a time.

Under load extra candidates are given up before a request has to be refused (`Brownout`, an extension of ours), since
they shorten a group only if the engine has room for them. So they are while a batch runs under `auto`, which has
expected to have the engine to itself: groups of which nothing was generated yet keep the share of their extra
candidates that the batch has of the engine (`share_left`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.checks import check_length, check_number

Floats = NDArray[np.float64]

CV_GAIN, CV_SCALE, CV_MAX = 1.5, 5.0, 1.75
"""Constants of the public code."""
NEGLIGIBLE = 1e-280
"""Weights below this share of the largest count as zero: their gains would leave the range of floats."""
WINDOW = 256
"""Requests that stand in for the cohort: a usual number of prompts a step."""
DEBT_HORIZON = 32
"""Requests over which a mean that is off its target is brought back. Short against the window, so that a stream that is
sorted by length is held as well; long against the noise of single requests."""
MAX_DEBT = 2**24
"""Far above what any group size allows: `DEBT_HORIZON` times its candidates."""
RELIEF = 0.5
"""Share of ``start`` by which the queue must be shorter on the way up than on the way down. Without this gap the scale
would flicker with every group that comes and goes."""


# --- the mean ---------------------------------------------------------------


def cv_log_mean(std: float, mean: float, size: int) -> float:
    """Compute the mean candidates per prompt as the public code does: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``: mean length std within a prompt, averaged over the last steps; ``mean``: mean length of the last step; both
    in tokens, see `DatasetStats`. ``size``: M.

    Raises:
        ValueError: ``std`` is negative, ``mean`` is not above 0, one is not finite, or ``size`` is below 1.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and at least 0, got {std}")
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(f"mean must be finite and above 0, got {mean}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
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

    A prompt without a known std (``None``) takes the mean of the known ones; without any, all share evenly.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a std is negative, infinite or not a number.
    """
    known = [x for x in stds if x is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    return allocate(weights_from_stds([mean if x is None else x for x in stds]), budget, low, high)


def weights_from_stds(stds: Sequence[float]) -> list[float]:
    """Compute the weights of a cohort: (x - min + 1) / (max - min), all ones if all are equal (paper's public code).

    Raises:
        ValueError: a std is negative, infinite or not a number.
    """
    x = _checked("stds", stds)
    if not x.size:
        return []
    spread = float(x.max() - x.min())
    # A spread too small to divide by is none. Only ratios of weights matter, and these tend to 1 as it vanishes.
    return [float(w) for w in (x - x.min() + 1) / spread] if spread > np.finfo(float).tiny else [1.0] * x.size


def allocate(weights: Sequence[float], budget: int, low: int, high: int) -> list[int]:
    """Compute the candidates of each prompt: the exact integer optimum of

        min sum_i w_i / m_i   subject to   sum_i m_i = budget,   low <= m_i <= high.

    The terms are convex in m_i, so giving one candidate at a time to the prompt with the largest gain w/m - w/(m + 1)
    is optimal: those with the largest gains of all are given out.

    ``budget``: candidates of all prompts together, clipped to [N * low, N * high]. Of two equal gains the prompt with
    fewer candidates comes first, then the one with the larger weight, then the earlier one. So a larger weight never
    gets fewer candidates, and equal weights share evenly. Weights of zero, or `NEGLIGIBLE` ones, get more than ``low``
    only when all others have ``high``. A million of N * (high - low) takes some 60 ms and 17 MB.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a weight is negative, infinite or not a number.
    """
    _check_bounds(low, high)
    w = _checked("weights", weights)
    extra = min(max(budget - low * w.size, 0), (high - low) * w.size)
    if not extra:
        return [low] * w.size
    # Only ratios matter. Scaling by a power of two is exact, and keeps gains within the range of floats.
    scaled = np.ldexp(w, -np.frexp(w.max())[1])
    m = np.arange(low, high)
    gains = np.where(scaled > NEGLIGIBLE, scaled, 0.0)[:, None] / (m * (m + 1))  # of the candidate after the m-th
    last = np.partition(gains, gains.size - extra, axis=None)[gains.size - extra]  # gain of the last one given out
    counts = (gains > last).sum(axis=1)
    prompt, given = np.nonzero(gains == last)
    first = np.lexsort((prompt, -w[prompt], given))[: extra - int(counts.sum())]
    counts += low + np.bincount(prompt[first], minlength=w.size)
    return [int(count) for count in counts]


# --- requests that come one at a time ---------------------------------------


@dataclass(frozen=True, slots=True)
class ShadowPriceState:
    """State of a `ShadowPrice`. Plain fields: ``ShadowPriceState(**json)`` restores it.

    ``recent``: length stds of the last requests in tokens, oldest first. ``debt``: candidates that were given out too
    few (above zero) or too many so far. ``carry``: remainder of rounding, in [-0.5, 0.5).
    """

    recent: tuple[float, ...] = ()
    debt: float = 0.0
    carry: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent", tuple(self.recent))  # JSON has lists only
        check_length("recent", self.recent, WINDOW)
        for std in self.recent:
            check_number("recent", std)
        check_number("debt", self.debt, -MAX_DEBT, MAX_DEBT)
        check_number("carry", self.carry, -0.5, math.nextafter(0.5, 0))


class ShadowPrice:
    """Candidates for requests that come one at a time.

    The continuous optimum of the cohort's problem is m_i = clip(sqrt(w_i / mu), low, high), where the shadow price mu
    is the same for all prompts. So a single request can be allocated from mu alone, and the last `WINDOW` requests
    stand in for the cohort. Weights are the cohort's; their divisor is the same for all and goes into mu, so w is
    x - min + 1. And mu is the price at which the mean of m over them is the target. So a request gets what it would
    have got, before rounding, in a cohort with the requests before it.

    That keeps the mean only while new requests look like old ones. So the debt, what was given out too little or too
    much, moves the target of the next requests, and is made up within about `DEBT_HORIZON` of them. It cannot grow
    beyond what moves the target to a bound: whatever the stream, the mean of n requests is off by at most about
    `DEBT_HORIZON` * (high - low) / n.

    Args:
        target: mean candidates per request, in [``low``, ``high``].
        low, high: bounds for each request.
        state: state to continue from; the bounds and the target may have changed since.

    Raises:
        ValueError: the bounds or the target are out of range.
    """

    def __init__(self, target: float, low: int, high: int, state: ShadowPriceState | None = None) -> None:
        _check_bounds(low, high)
        if not low <= target <= high:
            raise ValueError(f"target must be in [{low}, {high}], got {target}")
        state = state or ShadowPriceState()
        self.target = target
        self.low = low
        self.high = high
        self._recent: deque[float] = deque(state.recent, maxlen=WINDOW)
        self._debt = state.debt
        self._carry = state.carry

    @property
    def state(self) -> ShadowPriceState:
        return ShadowPriceState(tuple(self._recent), self._debt, self._carry)

    def candidates(self, std: float | None) -> int:
        """Allocate candidates to the next request by its prompt's length std in tokens.

        A prompt without a known std (``None``) takes the mean of the recent ones.

        Raises:
            ValueError: ``std`` is negative, infinite or not a number.
        """
        if std is not None:
            _checked("std", [std])
            self._recent.append(float(std))
        stds = list(self._recent)
        if std is None:
            stds.append(math.fsum(stds) / len(stds) if stds else 0.0)
        share = self._share_of_last(np.asarray(stds))
        # The remainder of rounding is added to the next request's share, so the mean is kept.
        m = min(max(math.floor(share + self._carry + 0.5), self.low), self.high)
        self._carry = min(max(self._carry + share - m, -0.5), math.nextafter(0.5, 0))
        self._debt += self.target - m
        return m

    def _share_of_last(self, stds: Floats) -> float:
        """Compute what the last of ``stds`` would get, before rounding, if all were one cohort.

        With s = 1 / sqrt(mu), the mean of clip(s * root, low, high) is a piecewise linear, increasing function of s,
        whose slope changes where a root leaves ``low`` and where it reaches ``high``. So its sums at these points are
        computed, and the target is interpolated between them.
        """
        low, high, roots = self.low, self.high, np.sqrt(stds - stds.min() + 1)
        target = min(max(self.target + self._debt / DEBT_HORIZON, low), high)
        bends = np.concatenate([low / roots, high / roots])
        order = np.argsort(bends)
        bends = bends[order]
        slopes = np.cumsum(np.concatenate([roots, -roots])[order])[:-1]
        sums = low * roots.size + np.concatenate([[0.0], np.cumsum(slopes * np.diff(bends))])
        scale = float(np.interp(target * roots.size, sums, bends))
        return min(max(scale * float(roots[-1]), low), high)


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
    def for_queue(cls, max_waiting: int, capacity: int, share: float) -> "Brownout":
        """Start at ``share`` of ``max_waiting``, but not while fewer wait than the engine runs at once."""
        return cls(max(share * max_waiting, capacity), max_waiting)

    def update(self, waiting: int) -> float:
        """Return the scale for so many waiting candidates."""
        if self._end > self._start:
            least, greatest = self._line(waiting + RELIEF * self._start), self._line(waiting)
            self.scale = min(max(self.scale, least), greatest)
        return self.scale

    def _line(self, waiting: float) -> float:
        return min(max((self._end - waiting) / (self._end - self._start), 0.0), 1.0)


def share_left(capacity: int | None, unfinished: int, own: int) -> float:
    """Return the share of an engine that others leave to a batch, from 1 (all of it, or nothing queues) to 0.

    ``capacity``: sequences that run at once; ``None`` for any number. ``unfinished``: those that run or queue, with the
    batch's ``own``.
    """
    if capacity is None or unfinished <= capacity:
        return 1.0
    return min(max((capacity - (unfinished - own)) / capacity, 0.0), 1.0)


def reduce_candidates(candidates: int, size: int, scale: float) -> int:
    """Return a group's candidates at this ``scale``, never fewer than its ``size``; rounded half up."""
    return size + math.floor((candidates - size) * scale + 0.5)


# --- checks -----------------------------------------------------------------


def _checked(name: str, values: Sequence[float]) -> Floats:
    """Return ``values`` as an array, all of which must be finite and at least 0."""
    x = np.asarray(values, dtype=np.float64)
    wrong = x[~(np.isfinite(x) & (x >= 0))]
    if wrong.size:
        raise ValueError(f"{name} must be finite and at least 0, got {wrong[0]}")
    return x


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"low and high must hold 1 <= low <= high, got low = {low} and high = {high}")
