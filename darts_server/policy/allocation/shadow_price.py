"""Allocate candidates to requests that come one at a time, by the shadow price of a candidate."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from darts_server.policy.allocation.optimum import Floats, check_bounds, checked

WINDOW = 256
"""Requests that stand in for the batch when they come one at a time: a usual number of prompts a step."""
DEBT_HORIZON = 32
"""Requests over which a mean that has run off its target is brought back: short against the window, so that a stream
that is sorted is held as well, and long against the noise of single requests."""


@dataclass(frozen=True, slots=True)
class ShadowPriceState:
    """What a `ShadowPrice` has learned. Plain fields: ``PriceState(**json)`` restores it.

    ``recent``: the length stds of the last requests, oldest first. ``debt``: candidates that were given out too few
    (above zero) or too many so far. ``carry``: what rounding still owes, in [-0.5, 0.5).
    """

    recent: tuple[float, ...] = ()
    debt: float = 0.0
    carry: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent", tuple(self.recent))  # JSON knows lists only
        checked("recent", self.recent)
        if not math.isfinite(self.debt):
            raise ValueError(f"debt must be finite, got {self.debt}")
        if not -0.5 <= self.carry < 0.5:
            raise ValueError(f"carry must be in [-0.5, 0.5), got {self.carry}")


class ShadowPrice:
    """Candidates for requests that come one at a time: m = clip(sqrt(w / mu), low, high) (the continuous optimum).

    The last `WINDOW` requests stand in for the batch. A weight is the batch's, (x - min + 1) / (max - min), over these;
    the divisor is the same for all of them and goes into the price mu, so w is x - min + 1. And mu is the price at
    which the mean of m over these is the target. So a request gets what it would have got, before rounding, in a batch
    with the requests before it, and outliers and old lengths are forgotten after `WINDOW` requests.

    That keeps the mean only while the stream looks like its past. What has been given out too little or too much (the
    debt) therefore moves the target of the next requests, so that it is made up within about `DEBT_HORIZON` of them.
    The debt cannot grow beyond what moves the target to a bound, so whatever the stream, the mean of n requests is off
    by at most about `DEBT_HORIZON` * (high - low) / n. Rounding hands its remainder on to the next request.

    Args:
        target: mean candidates per request, in [``low``, ``high``].
        low, high: bounds on each.
        state: where to go on; the bounds and the target may be others than before.

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

    @classmethod
    def from_state(cls, state: ShadowPriceState, target: float, low: int, high: int) -> "ShadowPrice":
        return cls(target, low, high, state)

    @property
    def state(self) -> ShadowPriceState:
        return ShadowPriceState(tuple(self._recent), self._debt, self._carry)

    def candidates(self, std: float | None) -> int:
        """Candidates for the next request, from its prompt's length std.

        A prompt that was never seen (``None``) takes the mean of the recent known ones.

        Raises:
            ValueError: ``std`` is negative, infinite or not a number.
        """
        known = list(self._recent)
        if std is None:
            wanted = self._split([*known, math.fsum(known) / len(known)] if known else [0.0])
        else:
            checked("std", [std])
            self._recent.append(float(std))
            wanted = self._split(list(self._recent))
        return self._round(wanted)

    def _split(self, stds: list[float]) -> float:
        """The share of the last of ``stds``, if all were a batch."""
        x = np.asarray(stds)
        target = min(max(self.target + self._debt / DEBT_HORIZON, self.low), self.high)
        roots = np.sqrt(x - x.min() + 1)
        return min(max(_scale(roots, target, self.low, self.high) * float(roots[-1]), self.low), self.high)

    def _round(self, wanted: float) -> int:
        m = min(max(math.floor(wanted + self._carry + 0.5), self.low), self.high)
        self._carry = min(max(self._carry + wanted - m, -0.5), math.nextafter(0.5, 0))
        self._debt += self.target - m
        return m


def _scale(roots: Floats, target: float, low: int, high: int) -> float:
    """The s at which the mean of clip(s * root, low, high) is ``target``; 1 / s² is the shadow price.

    The mean is a piecewise linear, increasing function of s. Its slope changes where a root leaves ``low`` and where it
    arrives at ``high``: the sums of m are worked out at all these places, and the target is looked up between them.
    """
    places = np.concatenate([low / roots, high / roots])
    order = np.argsort(places)
    places = places[order]
    slopes = np.cumsum(np.concatenate([roots, -roots])[order])[:-1]
    sums = low * roots.size + np.concatenate([[0.0], np.cumsum(slopes * np.diff(places))])
    return float(np.interp(target * roots.size, sums, places))
