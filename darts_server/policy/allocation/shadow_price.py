"""Allocate candidates to requests that come one at a time (DARTS, adaptive redundancy allocation, part b).

The continuous optimum of the cohort's problem is m_i = clip(sqrt(w_i / mu), low, high), where the shadow price mu is
the same for all prompts. So a single request can be allocated from mu alone, and mu estimated from the last requests.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from darts_server.policy.allocation.optimum import Floats, check_bounds, checked
from darts_server.policy.checks import check_length, check_number

WINDOW = 256
"""Requests that stand in for the cohort: a usual number of prompts a step."""
DEBT_HORIZON = 32
"""Requests over which a mean that is off its target is brought back. Short against the window, so that a stream that is
sorted by length is held as well; long against the noise of single requests."""

MAX_DEBT = 2**24
"""Far above what any group size allows: `DEBT_HORIZON` times its candidates."""


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

    The last `WINDOW` requests stand in for the cohort. Weights are the cohort's, (x - min + 1) / (max - min) over
    these; the divisor is the same for all of them and goes into mu, so w is x - min + 1. And mu is the price at which
    the mean of m over them is the target. So a request gets what it would have got, before rounding, in a cohort with
    the requests before it, and outliers and old lengths are forgotten after `WINDOW` requests.

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
        check_bounds(low, high)
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
        known = list(self._recent)
        if std is None:
            share = self._share_of_last([*known, math.fsum(known) / len(known)] if known else [0.0])
        else:
            checked("std", [std])
            self._recent.append(float(std))
            share = self._share_of_last(list(self._recent))
        return self._round(share)

    def _share_of_last(self, stds: list[float]) -> float:
        """Compute what the last of ``stds`` would get, before rounding, if all were one cohort."""
        x = np.asarray(stds)
        target = min(max(self.target + self._debt / DEBT_HORIZON, self.low), self.high)
        roots = np.sqrt(x - x.min() + 1)
        return min(max(_scale(roots, target, self.low, self.high) * float(roots[-1]), self.low), self.high)

    def _round(self, share: float) -> int:
        """Round to whole candidates. The remainder is added to the next request's share, so the mean is kept."""
        m = min(max(math.floor(share + self._carry + 0.5), self.low), self.high)
        self._carry = min(max(self._carry + share - m, -0.5), math.nextafter(0.5, 0))
        self._debt += self.target - m
        return m


def _scale(roots: Floats, target: float, low: int, high: int) -> float:
    """Find the s at which the mean of clip(s * root, low, high) is ``target``; the shadow price is 1 / s².

    The mean is a piecewise linear, increasing function of s, whose slope changes where a root leaves ``low`` and where
    it reaches ``high``. So its sums at these points are computed, and the target is interpolated between them.
    """
    bends = np.concatenate([low / roots, high / roots])
    order = np.argsort(bends)
    bends = bends[order]
    slopes = np.cumsum(np.concatenate([roots, -roots])[order])[:-1]
    sums = low * roots.size + np.concatenate([[0.0], np.cumsum(slopes * np.diff(bends))])
    return float(np.interp(target * roots.size, sums, bends))
