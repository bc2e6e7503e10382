"""Settings, scores and reports of a head, wherever it is trained. Nothing here imports torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.calibration import MAX_WEIGHT
from darts_server.estimates.score_metrics import WINDOW, ScoreMetrics
from darts_server.types import PruningStatus

NO_METRICS = ScoreMetrics(0, None, None, None)
Example = tuple[NDArray[np.floating], int, float, float]
"""The arguments of `head.Head.learn`."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """``hidden``: units of the hidden layer. ``batch_size``: examples per step. ``capacity``: of the replay buffer.

    ``half_life``: an example that is so many examples older is sampled half as often. ``min_labels``: examples before
    the first training. ``max_weight``: bound of the inverse propensity weights. ``window``: labels that metrics are
    taken over.

    A training starts with ``new_labels`` labels since the last one, or with any new label once that is ``max_delay``
    seconds ago. It makes at most ``max_steps`` steps, and starts none after ``max_seconds``.
    """

    hidden: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int = 64
    capacity: int = 4096
    half_life: float = 2048.0
    min_labels: int = 64
    max_weight: float = MAX_WEIGHT
    window: int = WINDOW
    seed: int = 0
    new_labels: int = 64
    max_delay: float = 1.0
    max_steps: int = 50
    max_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """``value``: s' in [0, 1]; the prior unless ``status`` is ``READY``.

    ``status``: of the head; ``None`` if what was to be scored has values that are not finite.
    """

    value: float
    status: PruningStatus | None


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """A head at one moment, without its weights.

    ``prior``: share of correct ones among the labels; a half without any. ``metrics``: how good its scores were on
    labels that it had not been trained on. ``steps``: all training steps behind the weights. ``labels``,
    ``trained_steps``, ``trained_seconds``, ``divergences``: since this head was created. ``loss``: mean of the last
    good training, in nats.
    """

    status: PruningStatus = PruningStatus.NO_LABELS
    prior: float = 0.5
    metrics: ScoreMetrics = NO_METRICS
    labels: int = 0
    steps: int = 0
    trained_steps: int = 0
    trained_seconds: float = 0.0
    loss: float | None = None
    divergences: int = 0
