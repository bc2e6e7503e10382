"""How sure the model was of a trajectory, and what that is worth: learned from the rewards of votes.

The scores are the mean and the lowest mean log-prob (`policy.confidence`). They say nothing of the chance to be right
before rewards came for trajectories that had result.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping

from darts_server.exceptions import StateError
from darts_server.policy.pruning.calibration import Calibration, CalibrationStatus, Label
from darts_server.rollout.debounce import Debounce
from darts_server.rollout.learned.blobs import BlobStore
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.observers.provenance import DEFAULT_KEPT
from darts_server.rollout.pruning.detection_point import DetectionPoint
from darts_server.rollout.pruning.score_kinds import ScoreKind, logprob_score
from darts_server.types import Sample

logger = logging.getLogger(__name__)

KINDS = (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB)
CALIBRATION = Calibration(cold_steps=0)
"""There are no steps at test time."""
KEEP_SECONDS = 2.0
"""Between two writes of what was learned: up to some 100 KB for each kind."""


class Confidence:
    """Calibrates the scores of trajectories with an answer, of the newest ``kept`` votes."""

    def __init__(
        self, documents: DocumentStore, kept: int = DEFAULT_KEPT, calibration: Calibration = CALIBRATION
    ) -> None:
        self._kept = kept
        blobs = BlobStore(documents, "vote")
        self._points: dict[str, DetectionPoint] = {
            kind: DetectionPoint(blobs, kind, calibration, width=0) for kind in KINDS
        }
        self._scores: OrderedDict[str, Mapping[int, Mapping[str, float]]] = OrderedDict()
        self._keep = Debounce(KEEP_SECONDS, self._write)
        self._read()

    def status(self, kind: str) -> CalibrationStatus:
        """Whether `chance` knows anything, or why not."""
        return self._points[kind].calibrator.status

    def chance(self, kind: str, score: float) -> float:
        """The chance that a trajectory with this score is right."""
        return self._points[kind].calibrator.probability(score)

    def remember(self, group_id: str, scores: Mapping[int, Mapping[str, float]]) -> None:
        """The trajectories of a vote, by candidate index, with their `scores_of`."""
        self._scores[group_id] = scores
        while len(self._scores) > self._kept:
            self._scores.popitem(last=False)

    def learn_reward(self, group_id: str, index: int, _: float, right: bool) -> None:
        """A trajectory got its first reward, of which only counts whether it is right."""
        for kind, score in self._scores.get(group_id, {}).get(index, {}).items():
            self._points[kind].calibrator.add(Label(score, float(right)))
            self._points[kind].changed = True
            self._keep.request()

    def _read(self) -> None:
        try:
            for kind, point in self._points.items():
                if (wrong := point.refresh()) is not None:
                    logger.warning("what was learned of votes by %s %s; it is learned anew", kind, wrong)
        except StateError as error:
            logger.warning("what was learned of votes cannot be read: %s", error)

    def _write(self) -> None:
        try:
            for point in self._points.values():
                point.keep()
        except StateError as error:
            logger.warning("what was learned of votes was not kept: %s", error)


def scores_of(sample: Sample) -> dict[str, float]:
    """Each kind of score, in [0, 1], of a trajectory with log-probs; none without usable ones."""
    scores = {kind: logprob_score(kind, tuple(sample.logprobs or ())) for kind in KINDS}
    return {kind: score for kind, score in scores.items() if score is not None}
