"""Allocate candidates to the prompts of a cohort (DARTS, adaptive redundancy allocation, part b).

`allocate` finds the exact integer optimum of

    min sum_i w_i / m_i   subject to   sum_i m_i = budget,   low <= m_i <= high.

The terms are convex in m_i, so giving one candidate at a time to the prompt with the largest gain w/m - w/(m + 1) is
optimal. That would take a step for each candidate. Instead, all candidates with a gain above some price are given out
at once, the price is bisected for all prompts together, and only the last candidates, between two prices, are sorted.

`shadow_price` does the same for requests that come one at a time.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

FEW_PER_PROMPT = 1 / 16
FEW = 1024
"""So many candidates are sorted instead of bisecting once more: it costs less than one more pass over the prompts."""
NEGLIGIBLE = 1e-280
"""Weights below this share of the largest count as zero: their gains would leave the range of floats."""


def weights_from_stds(stds: Sequence[float]) -> list[float]:
    """Compute the weights of a cohort: (x - min + 1) / (max - min), all ones if all are equal (paper's public code).

    Raises:
        ValueError: a std is negative, infinite or not a number.
    """
    x = checked("stds", stds)
    if not x.size:
        return []
    spread = float(x.max() - x.min())
    # A spread too small to divide by is none. Only ratios of weights matter, and these tend to 1 as it vanishes.
    return [float(w) for w in (x - x.min() + 1) / spread] if spread > np.finfo(float).tiny else [1.0] * x.size


def allocate(weights: Sequence[float], budget: int, low: int, high: int) -> list[int]:
    """Compute the candidates of each prompt: the exact integer optimum, in O(N log M).

    ``budget``: candidates of all prompts together, clipped to [N * low, N * high]. Of two equal gains the prompt with
    fewer candidates comes first, then the one with the larger weight, then the earlier one. So a larger weight never
    gets fewer candidates, and equal weights share evenly. Weights of zero, or `NEGLIGIBLE` ones, get more than ``low``
    only when all others have ``high``.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a weight is negative, infinite or not a number.
    """
    check_bounds(low, high)
    w = checked("weights", weights)
    extra = min(max(budget - low * w.size, 0), (high - low) * w.size)
    # Only ratios matter. Scaling by a power of two is exact, and keeps gains within the range of floats.
    scaled = np.ldexp(w, -np.frexp(w.max(initial=0.0))[1])
    weighty = scaled > NEGLIGIBLE
    room = (high - low) * int(weighty.sum())
    counts = np.full(w.size, low, dtype=np.int64)
    if extra < room:
        counts[weighty] = _allocate_extra(scaled[weighty], extra, low, high)
    else:
        counts[weighty] = high
        counts[~weighty] += _share_evenly(w[~weighty], extra - room)
    return [int(m) for m in counts]


def allocate_by_std(stds: Sequence[float | None], *, budget: int, low: int, high: int) -> list[int]:
    """Compute the candidates of each prompt from its length std in tokens (its EMA).

    A prompt without a known std (``None``) takes the mean of the known ones; without any, all share evenly.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a std is negative, infinite or not a number.
    """
    return allocate(_weights_from_known(stds), budget, low, high)


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


def _weights_from_known(stds: Sequence[float | None]) -> list[float]:
    known = [x for x in stds if x is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    return weights_from_stds([mean if x is None else x for x in stds])


# --- the greedy optimum, without its steps -----------------------------------


def _allocate_extra(w: Floats, extra: int, low: int, high: int) -> Counts:
    """Compute the counts after the ``extra`` candidates with the largest gains. All weights are positive.

    ``few`` and ``many`` are the counts at a price that is too high and at one that is too low.
    """
    few, many = np.full(w.size, low, dtype=np.int64), np.full(w.size, high, dtype=np.int64)
    # Logarithms of prices below and above all gains.
    floor, ceiling = math.log(w.min()) - 2 * math.log(high + 1), math.log(w.max())
    precision = 4 * float(np.finfo(float).eps) * (1 + abs(floor))  # prices closer than this are equal
    while (many - few).sum() > FEW + FEW_PER_PROMPT * w.size and ceiling - floor > precision:
        price = (floor + ceiling) / 2
        counts = _counts_at_price(w, math.exp(price), low, high)
        if counts.sum() - low * w.size > extra:
            many, floor = counts, price
        else:
            few, ceiling = counts, price
    return few + _largest_gains(w, few, many, extra - int((few - low).sum()))


def _counts_at_price(w: Floats, price: float, low: int, high: int) -> Counts:
    """Compute the counts when every candidate with a gain above ``price`` is given out.

    The gain of the candidate after the m-th is w / (m (m + 1)). Solving that for m takes a square root, whose rounding
    may be off by one: the last two lines compare with the exact gain.
    """
    m = np.clip(np.ceil((np.sqrt(1 + 4 * w / price) - 1) / 2), low, high).astype(np.int64)
    m -= (m > low) & (_gain(w, np.maximum(m - 1, 1)) <= price)
    m += (m < high) & (_gain(w, m) > price)
    return m


def _gain(w: Floats, m: Counts) -> Floats:
    return np.asarray(w / (m * (m + 1)), dtype=np.float64)


def _largest_gains(w: Floats, few: Counts, many: Counts, count: int) -> Counts:
    """Choose the ``count`` candidates with the largest gains between ``few`` and ``many``; as counts per prompt."""
    return np.bincount(_by_gain(w, few, many)[:count], minlength=w.size)


def _by_gain(w: Floats, few: Counts, many: Counts) -> Counts:
    """Return the prompt of each candidate between ``few`` and ``many``, the one with the largest gain first."""
    spare = many - few
    prompt = np.repeat(np.arange(w.size), spare)
    m = few[prompt] + np.arange(prompt.size) - np.repeat(np.cumsum(spare) - spare, spare)
    return np.asarray(prompt[np.lexsort((prompt, -w[prompt], m, -_gain(w[prompt], m)))], dtype=np.int64)


def _share_evenly(w: Floats, count: int) -> Counts:
    """Share ``count`` candidates evenly; the remainder goes to larger weights, then to earlier prompts."""
    each, rest = divmod(count, max(w.size, 1))
    shares = np.full(w.size, each, dtype=np.int64)
    shares[np.lexsort((np.arange(w.size), -w))[:rest]] += 1
    return shares


# --- checks -----------------------------------------------------------------


def checked(name: str, values: Sequence[float]) -> Floats:
    """Return ``values`` as an array.

    Raises:
        ValueError: one is negative, infinite or not a number.
    """
    x = np.asarray(values, dtype=np.float64)
    wrong = x[~(np.isfinite(x) & (x >= 0))]
    if wrong.size:
        raise ValueError(f"{name} must be finite and at least 0, got {wrong[0]}")
    return x


def check_bounds(low: int, high: int) -> None:
    """Check bounds on the candidates of a prompt.

    Raises:
        ValueError: they do not hold 1 <= ``low`` <= ``high``.
    """
    if not 1 <= low <= high:
        raise ValueError(f"low and high must hold 1 <= low <= high, got low = {low} and high = {high}")
