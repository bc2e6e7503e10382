"""How lengths are spread around their prompt's mean, recorded on-line.

Prompts differ in mean length; what they are taken to share is the distribution of the ratio r = length / mean of the
prompt. The ratios of all prompts are pooled. Those of candidates that were stopped early are right-censored, and the
product-limit (Kaplan-Meier) rule takes them for the longer ones that they are. It trusts no shape, and stopping at the
K-th shortest keeps it unbiased: nobody is stopped for what would have come.

Kept are not the ratios but counts of them in narrow bins, and old ones fade. That makes an update cheap and the state
small. Where only few of the longest have ended, the product-limit rule knows little, and nothing beyond the last one.
There the chance to end per length is taken to be constant (the tail is exponential), namely what the longest
`TAIL_SHARE` of the endings show.

Error of mean and 90th percentile, from a full pool; in brackets those of the product-limit rule that ends everyone at
the last ending. "Drawn": the 7 shortest and a drawn one end.

========================  =====================  =======================  =================  =================
ratios                    8 shortest of 12       8 shortest of 16         7 and a drawn, 12  7 and a drawn, 16
========================  =====================  =======================  =================  =================
log-normal, sigma 0.3     +1, +2 % (-1, +5 %)    +3, +6 % (-4, -12 %)     +1, +1 %           +1, 0 %
log-normal, sigma 0.5     0, +1 % (-3, +5 %)     +1, +3 % (-9, -21 %)     +1, +2 %           +1, +2 %
log-normal, sigma 0.8     -4, -2 % (-7, +8 %)    -5, -4 % (-19, -31 %)    +1, +5 %           +1, +6 %
exponential               +1, 0 % (-7, +7 %)     +1, +1 % (-19, -30 %)    +1, +2 %           +1, +1 %
two modes, 50 : 50        +3, +4 % (-1, +6 %)    +18, +32 % (-7, -17 %)   0, -1 %            +1, -1 %
========================  =====================  =======================  =================  =================

So it is good to a few per cent, except that two modes of which the upper shows its short end only come out too wide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OCTAVES = (-6, 6)
BINS_PER_OCTAVE = 24
"""Ratios from 1/64 to 64 in bins 3 % wide; what lies outside goes into the outermost."""
EDGES: Floats = 2.0 ** np.linspace(*OCTAVES, (OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE + 1)

MEMORY = 4096
"""Ratios that the pool amounts to when the older ones fade: some 300 groups, one or two steps of a usual size."""
NO_COUNT = 1e-9
"""A count that has faded so far is none."""
TAIL_SHARE = 0.05
"""More, and lengths with two modes come out too wide; fewer, and the tail is noise."""
TAIL_COUNT = 20
"""Endings that show a tail, at least, unless that were more than half of them all."""


@dataclass(frozen=True, slots=True)
class ProfileState:
    """What a `LengthProfile` has learned. Plain fields: ``ProfileState(**json)`` restores it.

    ``finished`` and ``censored``: counts in each bin, shortest first, faded.
    """

    finished: tuple[float, ...] = ()
    censored: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("finished", "censored"):
            counts = tuple(getattr(self, name)) or (0.0,) * (len(EDGES) - 1)  # JSON knows lists only
            if len(counts) != len(EDGES) - 1:
                raise ValueError(f"{name} must have {len(EDGES) - 1} counts, got {len(counts)}")
            if not all(math.isfinite(x) and x >= 0 for x in counts):
                raise ValueError(f"{name} must be finite and at least 0")
            object.__setattr__(self, name, counts)


class LengthProfile:
    """The pooled distribution of length / mean length of the prompt.

    Args:
        state: where to go on.
    """

    def __init__(self, state: ProfileState | None = None) -> None:
        state = state or ProfileState()
        self._counts: Floats = np.asarray([state.finished, state.censored], dtype=np.float64)

    @classmethod
    def from_state(cls, state: ProfileState) -> "LengthProfile":
        return cls(state)

    @property
    def state(self) -> ProfileState:
        finished, censored = self._counts.tolist()
        return ProfileState(tuple(finished), tuple(censored))

    def observe(self, ratios: Sequence[tuple[float, bool]]) -> None:
        """Take in candidates: length over mean length of the prompt, and whether it was stopped there (censored).

        Candidates that were stopped before their first token say nothing and are left out.

        Raises:
            ValueError: a ratio is negative or not finite; nothing is taken in.
        """
        if not all(math.isfinite(ratio) and ratio >= 0 for ratio, _ in ratios):
            raise ValueError(f"ratios must be finite and at least 0, got {[ratio for ratio, _ in ratios]}")
        told = [(ratio, censored) for ratio, censored in ratios if ratio > 0 or not censored]
        if not told:
            return
        self._counts *= (1 - 1 / MEMORY) ** len(told)
        self._counts[self._counts < NO_COUNT] = 0.0
        for ratio, censored in told:
            self._counts[int(censored), _bin(ratio)] += 1.0

    def quantiles(self, n: int) -> Floats | None:
        """Ratios at the probabilities (i + 1/2) / n, ascending, shape (n,).

        As equally likely values they stand for the distribution. ``None`` before any candidate has ended by itself.

        Raises:
            ValueError: ``n`` is below 1.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        return self._longer_than((np.arange(n, 0, -1, dtype=np.float64) - 0.5) / n)

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats | None:
        """Independent ratios of that shape; ``None`` before any candidate has ended by itself."""
        return self._longer_than(1.0 - rng.random(shape))  # (0, 1]: nothing is longer with probability 0

    def _longer_than(self, probability: Floats) -> Floats | None:
        """The ratio that is exceeded with that ``probability``, in (0, 1]."""
        finished, censored = self._counts
        total = float(finished.sum())
        if total <= 0:
            return None
        at_risk = np.cumsum((finished + censored)[::-1])[::-1]
        # Within a bin those that end come before those that are stopped: it is for them that these were stopped.
        ending = np.divide(finished, at_risk, out=np.zeros_like(finished), where=finished > 0)
        survival = np.concatenate([[1.0], np.cumprod(1.0 - ending)])
        tail = _tail(finished, total)
        ratios = np.interp(-probability, -survival[: tail + 1], EDGES[: tail + 1])
        # Everyone passes a bin whole but those who end or are stopped in it, who are taken to get half-way.
        exposure = float(((at_risk - (finished + censored) / 2) * np.diff(EDGES))[tail:].sum())
        wait = exposure / float(finished[tail:].sum())
        beyond = np.maximum(np.log(survival[tail] / probability), 0.0)
        return np.asarray(ratios + wait * beyond, dtype=np.float64)


def _bin(ratio: float) -> int:
    place = math.floor((math.log2(max(ratio, EDGES[0])) - OCTAVES[0]) * BINS_PER_OCTAVE)
    return min(place, len(EDGES) - 2)


def _tail(finished: Floats, total: float) -> int:
    """The bin from which on the tail is exponential: enough end there and beyond."""
    enough = max(TAIL_SHARE * total, min(TAIL_COUNT, total / 2))
    longest = np.cumsum(finished[::-1])[::-1]
    return int(np.flatnonzero(longest >= enough)[-1])
