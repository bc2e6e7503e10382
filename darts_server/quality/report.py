"""What the process that trains tells of its head."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.types import HeadStatus

UNKNOWN = 0.5
"""The prior without labels."""
NO_METRICS = ScoreMetrics(0, None, None, None)


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """When a head is trained: with ``labels`` new ones, or any new ones after ``seconds``; then at most ``steps`` steps
    that are begun within ``limit`` seconds.
    """

    labels: int = 64
    seconds: float = 1.0
    steps: int = 50
    limit: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """A head at one moment, without its weights.

    ``learned``, ``divergences`` and what was trained (``made`` steps, ``seconds``) count from the start of its process.
    ``loss``: mean of the last good training, in nats. ``epoch``: how often it had been told to restore something.
    """

    status: HeadStatus = HeadStatus.NO_LABELS
    prior: float = UNKNOWN
    metrics: ScoreMetrics = NO_METRICS
    learned: int = 0
    steps: int = 0
    made: int = 0
    seconds: float = 0.0
    loss: float | None = None
    divergences: int = 0
    epoch: int = 0

    def says(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(says: Mapping[str, Any]) -> "TrainerReport":
        """What `says` gave, from JSON."""
        return TrainerReport(
            **{**says, "status": HeadStatus(says["status"]), "metrics": ScoreMetrics(**says["metrics"])}
        )
