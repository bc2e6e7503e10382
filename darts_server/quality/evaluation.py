"""How good the head's scores are, by labels that it has not been trained on."""

from collections import deque
from dataclasses import dataclass

from darts_server.policy.pruning.calibration import Label, inverse_propensity_weights
from darts_server.policy.pruning.score_metrics import auc, brier_score, calibration_error

WINDOW = 1024
"""Labels: some steps of a usual batch."""


@dataclass(frozen=True, slots=True)
class ScoreMetrics:
    """Over the last ``labels`` labels; ``None`` where there are too few to tell.

    With inverse propensity weights they stand for all trajectories, also those that were pruned.
    """

    labels: int
    auc: float | None
    brier: float | None
    calibration_error: float | None


class Evaluation:
    """Prequential: each label is held against the score that its trajectory would get before it is trained on.

    ``most_weight``: bound of the inverse propensity weights; ``None`` counts all labels as one. ``window``: labels that
    the figures are taken over, the newest.
    """

    def __init__(self, most_weight: float | None, window: int = WINDOW) -> None:
        self._most_weight = most_weight
        self._labels: deque[Label] = deque(maxlen=window)

    def add(self, label: Label) -> None:
        self._labels.append(label)

    def metrics(self) -> ScoreMetrics:
        scores = [x.score for x in self._labels]
        targets = [x.target for x in self._labels]
        weights: list[float] | None = None
        if self._most_weight is not None:
            weights = inverse_propensity_weights([x.survival for x in self._labels], self._most_weight).tolist()
        return ScoreMetrics(
            labels=len(scores),
            auc=auc(scores, targets, weights),
            brier=brier_score(scores, targets, weights),
            calibration_error=calibration_error(scores, targets, weights),
        )
