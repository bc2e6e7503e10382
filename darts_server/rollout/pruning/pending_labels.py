"""Trajectories that were scored and have no reward yet, in bounded memory."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from darts_server.records import GroupKey
from darts_server.rollout.pruning.checkpoints import DetectionPoint

MAX_BYTES = 256 * 1024 * 1024
"""At a width of 4096 some 30,000 trajectories: the groups of several steps."""
_OVERHEAD_BYTES = 500
"""Of a trajectory with one score, without its hidden state; an estimate."""

Hidden = NDArray[np.float16] | NDArray[np.float32]


@dataclass(slots=True, eq=False)
class PendingScore:
    """A score at a detection point, after ``tokens`` tokens. ``hidden``: what it was made from, unless from log-probs.

    ``score``: s'. ``quality``: the calibrated q. Both are ``None`` if they could not be trusted.
    """

    point: DetectionPoint
    tokens: int
    hidden: Hidden | None
    score: float | None = None
    quality: float | None = None


@dataclass(slots=True, eq=False)
class PendingLabel:
    """The scores of one trajectory. ``survival``: the probability with which it was kept, over all of them.

    ``share``: of the survivors that it was sampled from for the tail of its group; 1 for the shortest.
    """

    scores: list[PendingScore] = field(default_factory=list)
    survival: float = 1.0
    share: float = 1.0
    is_undecided: bool = False
    """Whether the last score allows it to be pruned and the group has not decided yet."""


class PendingLabels:
    """Pending labels by group and candidate index; the oldest are dropped beyond ``max_bytes``."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._labels: dict[tuple[GroupKey, int], PendingLabel] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def find(self, group: GroupKey, index: int) -> PendingLabel | None:
        return self._labels.get((group, index))

    def add(self, group: GroupKey, index: int, score: PendingScore) -> int:
        """Add a score; return how many other trajectories were dropped to make room."""
        label = self._labels.get((group, index))
        if label is not None and any(score.tokens <= earlier.tokens for earlier in label.scores):
            self.pop(group, index)  # tokens never decrease, so a caller used its request id again
            label = None
        if label is None:
            label = self._labels[group, index] = PendingLabel()
        label.scores.append(score)
        self._bytes += _size(score)
        dropped = 0
        while self._bytes > self._max_bytes and len(self._labels) > 1:
            self.pop(*next(iter(self._labels)))
            dropped += 1
        return dropped

    def pop(self, group: GroupKey, index: int) -> PendingLabel | None:
        label = self._labels.pop((group, index), None)
        if label is not None:
            self._bytes -= sum(map(_size, label.scores))
        return label


def compact(hidden: NDArray[np.floating]) -> Hidden:
    """Copy at half precision if all values fit its range; states that were bfloat16 lose next to nothing."""
    with np.errstate(over="ignore"):
        half = hidden.astype(np.float16)
    return half if np.isfinite(half).all() else hidden.astype(np.float32)


def _size(score: PendingScore) -> int:
    return _OVERHEAD_BYTES + (0 if score.hidden is None else score.hidden.nbytes)
