"""One detection point: the calibration of its scores, and the survival probabilities of trajectories there."""

from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np

from darts_server.policy.pruning.calibration import Calibration, CalibrationState, Calibrator
from darts_server.policy.pruning.survival import Pruning, SurvivalCurve
from darts_server.rollout.learned.documents import BlobStore

RECENT_QUALITIES = 1024
"""Qualities that a survival curve is fitted to, pruned trajectories included: several steps with a usual batch size."""
FIT_INTERVAL = 32
"""Qualities between two fits of a curve. One fit takes half a millisecond."""
MAX_CURVES = 16
"""Pruning settings whose curve is cached; each caller may send its own."""


DetectionPoints = Mapping[int, "DetectionPoint"]


class SurvivalEstimator:
    """Computes survival probabilities from curves that are fitted to the recent qualities."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_QUALITIES)
        self._seen = 0
        self._curves: OrderedDict[Pruning, tuple[SurvivalCurve, int]] = OrderedDict()

    def survival(self, quality: float, pruning: Pruning) -> float:
        """Add a trajectory's quality, and return the probability with which to keep the trajectory."""
        self._recent.append(quality)
        self._seen += 1
        curve, fitted_at = self._curves.get(pruning, (None, 0))
        # Among few qualities each one changes the curve, so early fits are closer together.
        if curve is None or self._seen - fitted_at >= min(FIT_INTERVAL, 1 + fitted_at // 4):
            curve, fitted_at = pruning.fit(np.asarray(self._recent)), self._seen
        self._curves[pruning] = curve, fitted_at
        self._curves.move_to_end(pruning)
        if len(self._curves) > MAX_CURVES:
            self._curves.popitem(last=False)
        return curve.survival(quality)


class DetectionPoint:
    """Calibrates one kind of score after one number of tokens. Its labels are saved in ``blobs`` under ``key``.

    ``width``: of the hidden states that scores are made from; 0 for log-probs. Saved labels with another width are of
    another model, and are not loaded.
    """

    def __init__(self, blobs: BlobStore, key: str, calibration: Calibration, width: int) -> None:
        self.key = key
        self.estimator = SurvivalEstimator()
        self.has_changes = False
        """Whether something was learned since the last `save`."""
        self._blobs = blobs
        self._calibration = calibration
        self._width = width
        self._digest: str | None = None
        self.calibrator = Calibrator(calibration)

    def reload(self) -> str | None:
        """Load the saved labels if they are neither from here nor loaded already; return why they are unusable.

        Raises:
            StateError: the store cannot be read at present.
        """
        digest = self._blobs.digest(self.key)
        if digest == self._digest:
            return None
        self._digest, self.has_changes, self.estimator = digest, False, SurvivalEstimator()
        state, problem = self._load()
        self.calibrator = Calibrator(self._calibration, state)
        return problem

    def save(self) -> None:
        """Save the labels, unless a restore of the store has replaced the saved ones: then `reload` loads those.

        Raises:
            StateError: the labels cannot be saved.
        """
        if not self.has_changes or self._blobs.digest(self.key) != self._digest:
            return
        state = self.calibrator.state
        labels = np.asarray(state.labels, dtype="<f8").tobytes()
        self._digest = self._blobs.save(self.key, labels, {"steps": state.steps, "width": self._width})
        self.has_changes = False

    def _load(self) -> tuple[CalibrationState | None, str | None]:
        blob = self._blobs.load(self.key)
        if blob is None:
            return None, None
        if blob.numbers.get("width") != self._width:
            return None, f"is of hidden states of width {blob.numbers.get('width')}, not {self._width}"
        try:
            labels = np.frombuffer(blob.data, dtype="<f8").reshape(-1, 3)[-self._calibration.buffer :]
            return CalibrationState(tuple(map(tuple, labels.tolist())), blob.numbers["steps"]), None
        except (ValueError, KeyError) as error:
            return None, f"cannot be read ({error})"


def create_points(
    blobs: BlobStore, kind: str, detect_at: tuple[int, ...], calibration: Calibration, width: int
) -> DetectionPoints:
    """Create the detection points of one kind of score, by number of tokens, ascending."""
    return {tokens: DetectionPoint(blobs, f"{kind}@{tokens}", calibration, width) for tokens in detect_at}


def last_reached(points: DetectionPoints, tokens: int) -> DetectionPoint:
    """Return the last detection point at or before ``tokens``."""
    return points[max((at for at in points if at <= tokens), default=min(points))]
