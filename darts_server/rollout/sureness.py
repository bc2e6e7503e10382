"""How sure the model was of a trajectory, and what that is worth: learned from the rewards of votes.

The scores are the mean and the lowest mean log-prob (`policy.confidence`). They say nothing of the chance to be right
before rewards came for trajectories that had voted.
"""

from collections import OrderedDict
from collections.abc import Mapping

from darts_server.policy.calibration import Calibration, CalibrationState, Calibrator, Label, Status
from darts_server.rollout.documents import Documents, Notes
from darts_server.rollout.judging import Kind, sureness
from darts_server.rollout.provenance import DEFAULT_KEPT
from darts_server.rollout.soon import Soon
from darts_server.types import Sample

KINDS = (Kind.LOGPROB, Kind.LOWEST_LOGPROB)
KEEP_SECONDS = 2.0
"""Between two writes of what was learned: up to some 300 KB for each kind."""


class Sureness:
    """Calibrates the scores of trajectories with an answer, of the newest ``kept`` votes."""

    def __init__(self, documents: Documents, kept: int = DEFAULT_KEPT) -> None:
        self._kept = kept
        self._notes = Notes(documents, "vote", lambda value: CalibrationState(**value))
        calibration = Calibration(cold_steps=0)  # there are no steps at test time
        self._calibrators: dict[str, Calibrator] = {
            kind: Calibrator(calibration, self._notes.load(kind)) for kind in KINDS
        }
        self._scores: OrderedDict[str, Mapping[int, Mapping[str, float]]] = OrderedDict()
        self._keep = Soon(KEEP_SECONDS, self._write)

    def status(self, kind: str) -> Status:
        """Whether `chance` knows anything, or why not."""
        return self._calibrators[kind].status

    def chance(self, kind: str, score: float) -> float:
        """The chance that a trajectory with this score is right."""
        return self._calibrators[kind].probability(score)

    def remember(self, group_id: str, scores: Mapping[int, Mapping[str, float]]) -> None:
        """The trajectories of a vote, by candidate index, with their `scores_of`."""
        self._scores[group_id] = scores
        while len(self._scores) > self._kept:
            self._scores.popitem(last=False)

    def rewarded(self, group_id: str, index: int, _: float, right: bool) -> None:
        """A trajectory got its first reward, of which only counts whether it is right."""
        for kind, score in self._scores.get(group_id, {}).get(index, {}).items():
            self._calibrators[kind].add(Label(score, float(right)))
            self._keep.ask()

    def _write(self) -> None:
        for kind, calibrator in self._calibrators.items():
            state = calibrator.state
            self._notes.save(kind, {"labels": state.labels, "steps": state.steps})


def scores_of(sample: Sample) -> dict[str, float]:
    """Each kind of score, in [0, 1], of a trajectory with log-probs; none without usable ones."""
    scores = {kind: sureness(kind, tuple(sample.logprobs or ())) for kind in KINDS}
    return {kind: score for kind, score in scores.items() if score is not None}
