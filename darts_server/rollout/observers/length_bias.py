"""The length bias: lengths of returned trajectories against lengths that the policy generates."""

from collections import deque

import numpy as np

from darts_server.policy.lengths import complete_sample
from darts_server.records import GroupRecord
from darts_server.rollout.learned.statistics import observations
from darts_server.types import Outcome

MAX_GROUPS = 256
"""Number of groups that it covers: one step or a few."""


class LengthBias:
    """Compare generated and returned lengths over the last groups. Lengths of stopped candidates are estimated."""

    def __init__(self) -> None:
        self._generated: deque[list[tuple[float, float]]] = deque(maxlen=MAX_GROUPS)
        self._returned: deque[list[tuple[float, float]]] = deque(maxlen=MAX_GROUPS)

    def group_ended(self, record: GroupRecord) -> None:
        if record.outcome is Outcome.COMPLETED:
            self._generated.append(complete_sample(observations(record, beyond_limit=False)))
            self._returned.append([(1.0, float(c.tokens)) for c in record.selected])

    def mean(self, kind: str) -> float | None:
        """Mean length in tokens; ``kind`` is ``generated`` or ``returned``. ``None`` before a group was completed."""
        weights, lengths = self._pool(kind)
        return float(np.average(lengths, weights=weights)) if weights.sum() > 0 else None

    def quantile(self, kind: str, share: float) -> float | None:
        """The length that a ``share`` of trajectories does not exceed, in tokens."""
        weights, lengths = self._pool(kind)
        if not weights.sum() > 0:
            return None
        return float(np.quantile(lengths, share, weights=weights, method="inverted_cdf"))

    def _pool(self, kind: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
        groups = {"generated": self._generated, "returned": self._returned}[kind]
        pairs = [pair for group in groups for pair in group]
        return np.array([w for w, _ in pairs]), np.array([x for _, x in pairs])
