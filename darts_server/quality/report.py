"""The schedule that the trainer process follows, and the reports that it sends."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.types import HeadStatus

UNKNOWN_PRIOR = 0.5
"""The prior without labels."""
NO_METRICS = ScoreMetrics(0, None, None, None)


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """When a head is trained, and how long.

    A training starts with ``min_labels`` new labels, or with any new label once the last training is ``max_delay``
    seconds ago. It makes at most ``max_steps`` steps, and starts none after ``max_seconds``.
    """

    min_labels: int = 64
    max_delay: float = 1.0
    max_steps: int = 50
    max_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """A head at one moment, without its weights.

    ``steps``: all training steps behind the weights. ``labels``, ``trained_steps``, ``trained_seconds``,
    ``divergences``: since the process started. ``loss``: mean of the last good training, in nats. ``restores``: those
    that the head had received; `remote` drops a report from before its last one.
    """

    status: HeadStatus = HeadStatus.NO_LABELS
    prior: float = UNKNOWN_PRIOR
    metrics: ScoreMetrics = NO_METRICS
    labels: int = 0
    steps: int = 0
    trained_steps: int = 0
    trained_seconds: float = 0.0
    loss: float | None = None
    divergences: int = 0
    restores: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "TrainerReport":
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` if `to_json` did not make ``fields``."""
        status, metrics = HeadStatus(fields["status"]), ScoreMetrics(**fields["metrics"])
        return TrainerReport(**{**fields, "status": status, "metrics": metrics})
