"""Settings, scores and reports of a head. Nothing here imports torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.score_metrics import WINDOW, ScoreMetrics
from darts_server.types import PruningStatus

NO_METRICS = ScoreMetrics(0, None, None, None)
Example = tuple[NDArray[np.floating], int, float, float]
"""Arguments of `head.Head.learn`."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    hidden: int = 256
    learning_rate: float = 1e-3
    batch_size: int = 64
    capacity: int = 4096
    """Size of the replay buffer."""
    half_life: float = 2048.0
    """Age in examples at which an example is sampled half as often."""
    min_labels: int = 64
    window: int = WINDOW
    """Labels over which metrics are taken."""
    max_delay: float = 1.0
    """Seconds between trainings, unless there are `remote.NEW_LABELS` new labels before."""
    max_steps: int = 50
    max_seconds: float = 1.0
    """Time after which a training starts no further step."""


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    """The score s' in [0, 1]. It is the prior unless ``status`` is ``READY``."""
    status: PruningStatus | None
    """Status of the head, or None if the hidden state has values that are not finite."""


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """A head at one moment, without its weights. Totals count since the head was created."""

    status: PruningStatus = PruningStatus.NO_LABELS
    prior: float = 0.5
    """Share of correct trajectories among the labels, or .5 without labels."""
    metrics: ScoreMetrics = NO_METRICS
    """Quality of the scores on labels that the head had not been trained on."""
    labels: int = 0
    steps: int = 0
    """Training steps behind the weights, also from before a restore."""
    trained_steps: int = 0
    trained_seconds: float = 0.0
    loss: float | None = None
    """Mean loss of the last good training in nats."""
    divergences: int = 0
