"""One detection point: what its scores are worth, and who survives there."""

from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np

from darts_server.policy.pruning.calibration import Calibration, CalibrationState, Calibrator
from darts_server.policy.pruning.survival import Pruning, SurvivalCurve
from darts_server.rollout.learned.blobs import BlobStore

RECENT = 1024
"""Chances of trajectories scored last, whoever survived. Some steps of a usual batch."""
AIM_EVERY = 32
"""Chances between two solutions of delta, which takes half a millisecond."""
MOST_RULES = 16
"""Ways to prune whose aim is kept: callers may each bring their own."""


DetectionPoints = Mapping[int, "DetectionPoint"]


class Survival:
    """Aims each way to prune by the chances of the trajectories scored last."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._seen = 0
        self._aims: OrderedDict[Pruning, tuple[SurvivalCurve, int]] = OrderedDict()

    def of(self, chance: float, pruning: Pruning) -> float:
        """The probability that a trajectory with this chance is to be kept with."""
        self._recent.append(chance)
        self._seen += 1
        aim, since = self._aims.get(pruning, (None, 0))
        if aim is None or self._seen - since >= min(AIM_EVERY, 1 + since // 4):  # at first each one tells much
            aim, since = pruning.fit(np.asarray(self._recent)), self._seen
        self._aims[pruning] = aim, since
        self._aims.move_to_end(pruning)
        if len(self._aims) > MOST_RULES:
            self._aims.popitem(last=False)
        return aim.survival(chance)


class DetectionPoint:
    """A kind of score after so many tokens. Its labels are kept in ``blobs`` under ``key``.

    ``width``: of the hidden states that scores are made from, 0 of log-probs. What was learned with another one is of
    another model, and is not taken.
    """

    def __init__(self, blobs: BlobStore, key: str, calibration: Calibration, width: int) -> None:
        self.key = key
        self.survival = Survival()
        self.changed = False
        """Whether there is something to keep."""
        self._blobs = blobs
        self._calibration = calibration
        self._width = width
        self._digest: str | None = None
        self.calibrator = Calibrator(calibration)

    def refresh(self) -> str | None:
        """Take what is kept, if it is not what this has kept or taken itself; what was wrong with it.

        Raises:
            StateError: it cannot be read at present.
        """
        digest = self._blobs.digest(self.key)
        if digest == self._digest:
            return None
        self._digest, self.changed, self.survival = digest, False, Survival()
        state, wrong = self._kept()
        self.calibrator = Calibrator(self._calibration, state)
        return wrong

    def keep(self) -> None:
        """Raises ``StateError`` if it cannot be kept."""
        if not self.changed:
            return
        state = self.calibrator.state
        labels = np.asarray(state.labels, dtype="<f8").tobytes()
        self._digest = self._blobs.save(self.key, labels, {"steps": state.steps, "width": self._width})
        self.changed = False

    def _kept(self) -> tuple[CalibrationState | None, str | None]:
        blob = self._blobs.load(self.key)
        if blob is None:
            return None, None
        if blob.numbers.get("width") != self._width:
            return None, f"is of hidden states of width {blob.numbers.get('width')}, not {self._width}"
        try:
            labels = np.frombuffer(blob.data, dtype="<f8").reshape(-1, 3)
            return CalibrationState(tuple(map(tuple, labels.tolist())), blob.numbers["steps"]), None
        except (ValueError, KeyError) as error:
            return None, f"cannot be read ({error})"


def points(
    blobs: BlobStore, kind: str, detect_at: tuple[int, ...], calibration: Calibration, width: int
) -> DetectionPoints:
    """The detection points of one kind of score, by number of tokens, ascending."""
    return {tokens: DetectionPoint(blobs, f"{kind}@{tokens}", calibration, width) for tokens in detect_at}


def reached(known: DetectionPoints, tokens: int) -> DetectionPoint:
    """The last detection point that a trajectory of so many tokens has reached; it may be some tokens past it."""
    return known[max((at for at in known if at <= tokens), default=min(known))]
