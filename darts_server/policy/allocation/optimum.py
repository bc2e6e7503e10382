"""Who gets how many candidates (DARTS, adaptive redundancy allocation, part b).

For a batch, `allocate` finds the exact integer optimum of

    min sum_i w_i / m_i   subject to   sum_i m_i = budget,   low <= m_i <= high.

The terms are convex in m_i, so giving one candidate at a time to the prompt with the largest gain w/m - w/(m + 1) is
optimal. That greedy order is not walked unit by unit: all units with a gain above some price are given out at once, the
price is bisected over all prompts together, and only the last units, between two prices, are put in order.

`ShadowPrice` does the same for requests that come one at a time.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

FEW_PER_PROMPT = 1 / 16
FEW = 1024
"""So many units are put in order rather than halved once more: it costs less than one more pass over the prompts."""
NEGLIGIBLE = 1e-280
"""Weights below this share of the largest count as zero: their gains would leave the range of floats."""


def weights_from_stds(stds: Sequence[float]) -> list[float]:
    """The weights of a batch: (x - min + 1) / (max - min), all ones if all are equal (the paper's public code).

    Raises:
        ValueError: a std is negative, infinite or not a number.
    """
    x = checked("stds", stds)
    if not x.size:
        return []
    spread = float(x.max() - x.min())
    # A spread too small to divide by is no spread: only the ratios of weights matter, and these are one then.
    return [float(w) for w in (x - x.min() + 1) / spread] if spread > np.finfo(float).tiny else [1.0] * x.size


def allocate(weights: Sequence[float], budget: int, low: int, high: int) -> list[int]:
    """Candidates for each prompt of a batch: the exact integer optimum, in O(N log M).

    ``budget`` is the number of candidates of the whole batch; one that the bounds cannot meet is clipped to
    [N * low, N * high]. Of two equal gains the prompt that has fewer candidates comes first, then the one with the
    larger weight, then the earlier one. So a larger weight never gets fewer, and equal ones share evenly, the earlier
    first. Weights of zero, or `NEGLIGIBLE` ones, get more than ``low`` only when all others have ``high``.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a weight is negative, infinite or not a number.
    """
    check_bounds(low, high)
    w = checked("weights", weights)
    extra = min(max(budget - low * w.size, 0), (high - low) * w.size)
    # Only ratios matter, and a power of two leaves them as they are.
    scaled = np.ldexp(w, -np.frexp(w.max(initial=0.0))[1])
    weighty = scaled > NEGLIGIBLE
    room = (high - low) * int(weighty.sum())
    counts = np.full(w.size, low, dtype=np.int64)
    if extra < room:
        counts[weighty] = _greedy(scaled[weighty], extra, low, high)
    else:
        counts[weighty] = high
        counts[~weighty] += _even(w[~weighty], extra - room)
    return [int(m) for m in counts]


def allocate_by_std(stds: Sequence[float | None], *, budget: int, low: int, high: int) -> list[int]:
    """Candidates for each prompt of a batch, from its length std (its EMA).

    A prompt that was never seen (``None``) takes the mean of the known ones; if none was, all share evenly.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``, or a std is negative, infinite or not a number.
    """
    known = [x for x in stds if x is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    return allocate(weights_from_stds([mean if x is None else x for x in stds]), budget, low, high)


# --- the batch optimum ------------------------------------------------------


def _greedy(w: Floats, extra: int, low: int, high: int) -> Counts:
    """Counts after the ``extra`` units with the largest gains; fewer than there are, and all weights positive."""
    few, many = np.full(w.size, low, dtype=np.int64), np.full(w.size, high, dtype=np.int64)
    # Logarithms of prices: no gain lies outside.
    floor, ceiling = math.log(w.min()) - 2 * math.log(high + 1), math.log(w.max())
    precision = 4 * float(np.finfo(float).eps) * (1 + abs(floor))  # prices closer than this are equal
    while (many - few).sum() > FEW + FEW_PER_PROMPT * w.size and ceiling - floor > precision:
        price = (floor + ceiling) / 2
        counts = _counts(w, math.exp(price), low, high)
        if counts.sum() - low * w.size > extra:
            many, floor = counts, price
        else:
            few, ceiling = counts, price
    return few + _best(w, few, many, extra - int((few - low).sum()))


def _counts(w: Floats, price: float, low: int, high: int) -> Counts:
    """How many candidates each prompt has when every unit with a gain above ``price`` is given out.

    The gain of the unit after m is w / (m (m + 1)), which solves to a square root; the last step is exact.
    """
    m = np.clip(np.ceil((np.sqrt(1 + 4 * w / price) - 1) / 2), low, high).astype(np.int64)
    m -= (m > low) & (_gain(w, np.maximum(m - 1, 1)) <= price)
    m += (m < high) & (_gain(w, m) > price)
    return m


def _gain(w: Floats, m: Counts) -> Floats:
    return np.asarray(w / (m * (m + 1)), dtype=np.float64)


def _best(w: Floats, few: Counts, many: Counts, units: int) -> Counts:
    """The ``units`` with the largest gains among those from ``few`` to ``many``, as counts to add to ``few``."""
    spare = many - few
    prompt = np.repeat(np.arange(w.size), spare)
    m = few[prompt] + np.arange(prompt.size) - np.repeat(np.cumsum(spare) - spare, spare)
    order = np.lexsort((prompt, -w[prompt], m, -_gain(w[prompt], m)))
    return np.bincount(prompt[order[:units]], minlength=w.size)


def _even(w: Floats, units: int) -> Counts:
    """``units`` shared evenly; the rest of the division goes to the larger, then to the earlier."""
    each, rest = divmod(units, max(w.size, 1))
    shares = np.full(w.size, each, dtype=np.int64)
    shares[np.lexsort((np.arange(w.size), -w))[:rest]] += 1
    return shares


# --- checks -----------------------------------------------------------------


def checked(name: str, values: Sequence[float]) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    wrong = x[~(np.isfinite(x) & (x >= 0))]
    if wrong.size:
        raise ValueError(f"{name} must be finite and at least 0, got {wrong[0]}")
    return x


def check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"low and high must hold 1 <= low <= high, got low = {low} and high = {high}")
