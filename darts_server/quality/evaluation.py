"""Metrics of the head's scores, on labels that it has not been trained on."""

from collections import deque
from dataclasses import dataclass

from darts_server.policy.pruning.calibration import Label, inverse_propensity_weights
from darts_server.policy.pruning.score_metrics import auc, brier_score, calibration_error

WINDOW = 1024
"""Labels: those of several training steps with a usual batch size."""


@dataclass(frozen=True, slots=True)
class ScoreMetrics:
    """Metrics over the last ``labels`` labels; ``None`` where there are too few.

    With inverse propensity weights they are estimates for all trajectories, the pruned ones included.
    """

    labels: int
    auc: float | None
    brier: float | None
    calibration_error: float | None


class Evaluation:
    """Prequential evaluation: each label comes with the score from before the head was trained on it.

    ``max_weight``: bound of the inverse propensity weights; ``None`` gives each label the weight 1. ``window``: the
    metrics are over so many of the newest labels.
    """

    def __init__(self, max_weight: float | None, window: int = WINDOW) -> None:
        self._max_weight = max_weight
        self._labels: deque[Label] = deque(maxlen=window)

    def add(self, label: Label) -> None:
        self._labels.append(label)

    def metrics(self) -> ScoreMetrics:
        scores = [x.score for x in self._labels]
        targets = [x.target for x in self._labels]
        weights: list[float] | None = None
        if self._max_weight is not None:
            weights = inverse_propensity_weights([x.survival for x in self._labels], self._max_weight).tolist()
        return ScoreMetrics(
            labels=len(scores),
            auc=auc(scores, targets, weights),
            brier=brier_score(scores, targets, weights),
            calibration_error=calibration_error(scores, targets, weights),
        )
