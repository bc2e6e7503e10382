"""The confidence of the model in its trajectories, from log-probs, and its calibration by the rewards of votes.

Scores are the mean and the lowest mean log-prob (`rollout.pruning.scoring`). They become probabilities of being
correct once rewards came for trajectories of votes.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping

from darts_server.exceptions import StateError
from darts_server.policy.pruning.calibration import Calibration, CalibrationStatus, Label
from darts_server.records import GroupKey
from darts_server.rollout.debounce import Debounce
from darts_server.rollout.learned.documents import BlobStore, DocumentStore
from darts_server.rollout.observers.provenance import DEFAULT_KEPT
from darts_server.rollout.pruning.scoring import DetectionPoint, ScoreKind, logprob_score
from darts_server.types import Sample

logger = logging.getLogger(__name__)

BLOB_KIND = "vote"
KINDS = (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB)
CALIBRATION = Calibration(cold_steps=0)
"""Votes are for test time, where the trainer makes no steps."""
SAVE_SECONDS = 2.0
"""Between two writes of up to some 100 KB for each kind."""


class Confidence:
    """Calibrates scores, by the rewards of trajectories with an answer in the newest ``kept`` votes."""

    def __init__(
        self, documents: DocumentStore, kept: int = DEFAULT_KEPT, calibration: Calibration = CALIBRATION
    ) -> None:
        self._kept = kept
        blobs = BlobStore(documents, BLOB_KIND)
        self._points: dict[str, DetectionPoint] = {
            kind: DetectionPoint(blobs, kind, calibration, 0, f"of votes by {kind}") for kind in KINDS
        }
        self._scores: OrderedDict[GroupKey, Mapping[int, Mapping[str, float]]] = OrderedDict()
        self._save_soon = Debounce(SAVE_SECONDS, self._save)
        self._load()

    def status(self, kind: str) -> CalibrationStatus:
        """``READY``, or the reason why `probability` returns the prior for each score."""
        return self._points[kind].calibrator.status

    def probability(self, kind: str, score: float) -> float:
        """Return the probability that a trajectory with this score is correct."""
        return self._points[kind].calibrator.probability(score)

    def remember(self, group: GroupKey, scores: Mapping[int, Mapping[str, float]]) -> None:
        """Store the `logprob_scores` of a vote's trajectories, by candidate index, until their rewards come."""
        self._load()
        self._scores[group] = scores
        while len(self._scores) > self._kept:
            self._scores.popitem(last=False)

    def learn_reward(self, group: GroupKey, index: int, _: float, correct: bool) -> None:
        """Learn whether a trajectory is correct from its first reward; its value does not count."""
        for kind, score in self._scores.get(group, {}).get(index, {}).items():
            self._points[kind].add(Label(score, float(correct)))
            self._save_soon.request()

    def _load(self) -> None:
        """Load what a restore has put into the store, and at first what was saved."""
        try:
            for point in self._points.values():
                point.reload()
        except StateError as error:
            logger.warning("the saved calibration of votes cannot be read: %s", error)

    def _save(self) -> None:
        self._load()
        try:
            for point in self._points.values():
                point.save()
        except StateError as error:
            logger.warning("the calibration of votes was not saved: %s", error)


def logprob_scores(sample: Sample) -> dict[str, float]:
    """Compute each kind of score, in [0, 1]; kinds without usable log-probs are left out."""
    scores = {kind: logprob_score(kind, tuple(sample.logprobs or ())) for kind in KINDS}
    return {kind: score for kind, score in scores.items() if score is not None}
