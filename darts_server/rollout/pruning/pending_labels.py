"""Trajectories that were scored and have no reward yet, in bounded memory."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from darts_server.rollout.pruning.detection_point import DetectionPoint

MOST_BYTES = 256 * 1024 * 1024
"""At a width of 4096 some 30,000 trajectories: the groups of several steps."""
_BESIDES = 500
"""Bytes of a trajectory and of a score beside its hidden state, about."""

Hidden = NDArray[np.float16] | NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PendingScore:
    """One score: at which detection point, after how many ``tokens``, and from which hidden state, if from one.

    ``score``: s', and ``chance``: q; ``None`` where it was not to be trusted.
    """

    point: DetectionPoint
    tokens: int
    hidden: Hidden | None
    score: float | None = None
    chance: float | None = None


@dataclass(slots=True, eq=False)
class PendingLabel:
    """A trajectory. ``survival``: the probability with which it was kept so far, over all its scores."""

    scores: list[PendingScore] = field(default_factory=list)
    survival: float = 1.0
    asked: bool = False
    """Whether its last score could have it pruned, and it is not known yet whether it was."""


class PendingLabels:
    """By group id and candidate index, the newest within ``most_bytes``."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._pending: dict[tuple[str, int], PendingLabel] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def find(self, group_id: str, index: int) -> PendingLabel | None:
        return self._pending.get((group_id, index))

    def add(self, group_id: str, index: int, scored: PendingScore) -> int:
        """Remember a score; how many other trajectories were forgotten for it."""
        pending = self._pending.get((group_id, index))
        if pending is not None and any(scored.tokens <= known.tokens for known in pending.scores):
            self.pop(group_id, index)  # a caller used its request id again: the newer one counts
            pending = None
        if pending is None:
            pending = self._pending[group_id, index] = PendingLabel()
        pending.scores.append(scored)
        self._bytes += _size(scored)
        forgotten = 0
        while self._bytes > self._most and len(self._pending) > 1:
            self.pop(*next(iter(self._pending)))
            forgotten += 1
        return forgotten

    def pop(self, group_id: str, index: int) -> PendingLabel | None:
        pending = self._pending.pop((group_id, index), None)
        if pending is not None:
            self._bytes -= sum(map(_size, pending.scores))
        return pending


def compact(hidden: NDArray[np.floating]) -> Hidden:
    """A copy of half the size. What half precision cannot hold stays as it is; of bfloat16 it loses next to nothing."""
    with np.errstate(over="ignore"):
        half = hidden.astype(np.float16)
    return half if np.isfinite(half).all() else hidden.astype(np.float32)


def _size(scored: PendingScore) -> int:
    return _BESIDES + (0 if scored.hidden is None else scored.hidden.nbytes)
