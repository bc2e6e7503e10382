"""How many candidates each prompt gets (DARTS, adaptive redundancy allocation).

`cv_log_mean` chooses the mean number of candidates per prompt. `allocate` shares it among the prompts of a cohort by
the spread of their lengths, and `ShadowPrice` does so for single requests.

Under load, `Brownout` gives up extra candidates before a request has to be refused (an extension of ours).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from darts_server.estimates.checks import check_length, check_number
from darts_server.estimates.isotonic import Floats

CV_GAIN = 1.5
CV_SCALE = 5.0
CV_MAX = 1.75
"""Constants of the paper's public code."""
WINDOW = 256
"""Latest requests that serve as a cohort, as usual in a step."""
DEBT_HORIZON = 32
"""Requests that make up a debt: few against the window, so that the mean of a sorted stream stays at its target, and
many against the noise of single requests."""
MAX_DEBT = 2**24
"""Largest accepted debt, far above any real debt."""
BROWNOUT_SHARE = 0.5
"""Share of the queue where redundancy begins to fall. A short peak changes no group."""
RELIEF = 0.5
"""Gap between falling and rising redundancy, as a share of ``start``."""
BELOW_HALF = math.nextafter(0.5, 0)
"""Largest carry. A carry of 0.5 would round a whole number up."""


def cv_log_mean(std: float, mean: float, size: int) -> float:
    """Compute the mean number of candidates per prompt: clip(M (1 + 1.5 ln(5 std / mean)), M, 1.75 M).

    ``std``, ``mean``: of lengths in tokens, see `DatasetStats`. ``size``: M.
    """
    spread = CV_SCALE * std / mean
    if spread <= 1:
        return float(size)
    return size * min(1 + CV_GAIN * math.log(spread), CV_MAX)


# --- prompts of a cohort ----------------------------------------------------


def allocate_evenly(mean: float, groups: int, carried: float = 0.0) -> tuple[list[int], float]:
    """Compute whole numbers of candidates with this mean, as nearly as possible.

    ``carried``: candidates that earlier groups lack. Returns the candidates of each group, and the new ``carried``.
    """
    counts = []
    for _ in range(groups):
        exact = mean + carried
        count = math.floor(exact + 0.5)
        carried = exact - count
        counts.append(count)
    return counts, carried


def allocate_by_std(
    stds: Sequence[float | None],
    *,
    budget: int,
    low: int,
    high: int,
) -> list[int]:
    """Compute the candidates of each prompt from its length std in tokens.

    An unknown std (None) counts as the mean of the known stds.
    """
    mean_known = _mean([std for std in stds if std is not None])
    known = np.array([mean_known if std is None else std for std in stds], dtype=np.float64)
    spread = float(np.ptp(known)) if known.size else 0.0
    weights = np.ones(known.size)
    # As in the paper's public code, although the division scales all weights alike. A smaller spread cannot be divided
    # by. As it vanishes, the ratios of the weights tend to 1.
    if spread > np.finfo(float).tiny:
        weights = (known - known.min() + 1) / spread
    return allocate(weights, budget, low, high)


def allocate(
    weights: Sequence[float] | Floats,
    budget: int,
    low: int,
    high: int,
) -> list[int]:
    """Compute the candidates of each prompt: the exact integer optimum of

        min sum_i w_i / m_i   subject to   sum_i m_i = budget,   low <= m_i <= high.

    A larger weight never gets fewer candidates.

    Args:
        weights: above 0.
        budget: candidates of all prompts together, clipped to [N * low, N * high].
    """
    w = np.asarray(weights, dtype=np.float64)
    m = np.arange(low, high)
    # The gain of candidate m + 1 is w / m - w / (m + 1).
    gains = w[:, None] / (m * (m + 1))
    return allocate_by_gain(
        gains,
        budget,
        low,
        preference=w,
    )


def allocate_by_gain(
    gains: Floats,
    budget: int,
    low: int,
    preference: Floats,
) -> list[int]:
    """Compute the candidates of each prompt that have the largest sum of gains.

    Gains that do not rise within a prompt make it optimal to give each candidate to the prompt with the largest gain.
    Equal gains go to the prompt with fewer candidates, then to the larger ``preference``, then to the earlier prompt.
    N * (high - low) = 1,000,000 takes 60 ms and 17 MB.

    Args:
        gains: element [i, k] is the gain of the candidate after the first ``low + k`` candidates of prompt i.
        budget: candidates of all prompts together, clipped to [N * low, N * high].
    """
    num_prompts = len(gains)
    num_extra = min(max(budget - low * num_prompts, 0), gains.size)
    if not num_extra:
        return [low] * num_prompts

    smallest_gain = np.partition(gains, gains.size - num_extra, axis=None)[gains.size - num_extra]
    extra_counts = (gains > smallest_gain).sum(axis=1)

    # Of the candidates with exactly this gain, take as many as are missing.
    num_missing = num_extra - int(extra_counts.sum())
    prompts, places = np.nonzero(gains == smallest_gain)
    order = np.lexsort((prompts, -preference[prompts], places))
    extra_counts += np.bincount(prompts[order[:num_missing]], minlength=num_prompts)
    return [low + int(count) for count in extra_counts]


# --- single requests --------------------------------------------------------


@dataclass(slots=True)
class ShadowPrice:
    """Allocates candidates to single requests. ``ShadowPrice(**json)`` restores it.

    The continuous optimum for a cohort is m_i = clip(sqrt(w_i / mu), low, high), where all prompts share the shadow
    price mu. The last `WINDOW` requests serve as the cohort: mu is the price at which their mean m is the target. The
    divisor of the weights is left to mu, so w is x - min + 1.

    In any stream, the mean of n requests is off by at most about `DEBT_HORIZON` * (high - low) / n.

    ``recent``: length stds of the last requests in tokens, oldest first. ``debt``: number of candidates that were given
    too few so far, or below zero, too many. ``carry``: remainder of rounding, in [-0.5, 0.5).

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
        check_number("carry", self.carry, -0.5, BELOW_HALF)

    def allocate(
        self,
        std: float | None,
        target: float,
        low: int,
        high: int,
    ) -> int:
        """Allocate candidates to the next request by its prompt's length std in tokens.

        An unknown std (None) counts as the mean of recent stds. ``target``: mean number of candidates per request. The
        other arguments may change between requests.
        """
        if std is not None:
            self.recent = [*self.recent, float(std)][-WINDOW:]
        stds = np.asarray(self.recent, dtype=np.float64)
        if std is None:
            stds = np.append(stds, _mean(self.recent))

        # Each request of the cohort gets clip(scale * root, low, high) candidates, where scale = 1 / sqrt(price). The
        # sum is a piecewise linear, increasing function of the scale. Its slope changes where a root leaves `low` and
        # where it reaches `high`. The wanted sum is interpolated between the sums at these points.
        roots = np.sqrt(stds - stds.min() + 1)
        # The next `DEBT_HORIZON` requests make up the debt.
        target_with_debt = target + self.debt / DEBT_HORIZON
        wanted_mean = min(max(target_with_debt, low), high)
        bends = np.concatenate([low / roots, high / roots])
        order = np.argsort(bends)
        bends = bends[order]
        slopes = np.cumsum(np.concatenate([roots, -roots])[order])[:-1]
        sums = low * roots.size + np.concatenate([[0.0], np.cumsum(slopes * np.diff(bends))])
        scale = float(np.interp(wanted_mean * roots.size, sums, bends))

        # The last of `stds` is this request. The carry evens out rounding, and the debt any difference from the target.
        exact = min(max(scale * float(roots[-1]), low), high)
        candidates = min(max(math.floor(exact + self.carry + 0.5), low), high)
        self.carry = min(max(self.carry + exact - candidates, -0.5), BELOW_HALF)
        self.debt += target - candidates
        return candidates


def _mean(stds: Sequence[float]) -> float:
    if not stds:
        return 0.0
    return math.fsum(stds) / len(stds)


# --- under load -------------------------------------------------------------


class Brownout:
    """The share of redundancy that is left, from 1 (all) to 0 (none), by the number of waiting candidates.

    It falls linearly from ``start`` waiting candidates to ``end``. If ``end`` is not above ``start``, it stays 1.
    """

    def __init__(self, start: float, end: float) -> None:
        self._start = start
        self._end = end
        self.scale = 1.0

    @classmethod
    def for_queue(cls, max_waiting: int, capacity: int) -> "Brownout":
        """Start at `BROWNOUT_SHARE` of the queue, but not while fewer candidates wait than the engine runs at once."""
        return cls(max(BROWNOUT_SHARE * max_waiting, capacity), max_waiting)

    def scale_at(self, waiting: int) -> float:
        if self._end <= self._start:
            return 1.0
        # The scale falls at once to the line from `start` to `end`. It rises only to a lower line, so that it does not
        # change with every group.
        width = self._end - self._start
        highest = min(max((self._end - waiting) / width, 0.0), 1.0)
        lowest = (self._end - (waiting + RELIEF * self._start)) / width
        return min(max(self.scale, lowest), highest)

    def update(self, waiting: int) -> float:
        """Store and return `scale_at`. The stored scale delays the next rise."""
        self.scale = self.scale_at(waiting)
        return self.scale


def reduce_candidates(candidates: int, size: int, scale: float) -> int:
    """Return a group's candidates at this ``scale``, rounded half up and at least ``size``."""
    return size + math.floor((candidates - size) * scale + 0.5)
