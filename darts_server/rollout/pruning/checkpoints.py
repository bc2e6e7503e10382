"""What pruning has learned, and saves: calibrations at detection points, and the quality head."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

import numpy as np

from darts_server.exceptions import InvalidRequest, StateError
from darts_server.policy.pruning.calibration import Calibration, CalibrationState, Calibrator
from darts_server.policy.pruning.survival import Pruning, SurvivalCurve
from darts_server.rollout.learned.documents import Blob, BlobStore

logger = logging.getLogger(__name__)

HEAD_KEY = "head"
HEAD_SAVE_SECONDS = 10.0
"""Between two writes of up to 13 MB. A killed process loses that much training of the head."""
RECENT_QUALITIES = 1024
"""Qualities that a survival curve is fitted to, pruned trajectories included: several steps with a usual batch size."""
FIT_INTERVAL = 32
"""Qualities between two fits of a curve. One fit takes half a millisecond."""
MAX_CURVES = 16
"""Pruning settings whose curve is cached; each caller may send its own."""


class SavedBlob:
    """Tracks whether a restored state has replaced a blob since it was saved or loaded.

    All methods raise StateError if the store cannot be read or written at present.
    """

    def __init__(self, blobs: BlobStore, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._digest: str | None = None

    def is_replaced(self) -> bool:
        """Whether the stored blob differs from the one that was saved or loaded last."""
        return self._blobs.digest(self._key) != self._digest

    def load(self) -> Blob | None:
        digest = self._blobs.digest(self._key)
        blob = self._blobs.load(self._key)
        self._digest = digest
        return blob

    def save(self, data: bytes, numbers: Mapping[str, int]) -> None:
        self._digest = self._blobs.save(self._key, data, numbers)


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
        self.calibrator = Calibrator(calibration)
        self.has_changes = False
        """Whether something was learned since the last `save`."""
        self._saved = SavedBlob(blobs, key)
        self._calibration = calibration
        self._width = width

    def reload(self) -> str | None:
        """Load the labels that a restore put into the store; return why they are unusable.

        Raises:
            StateError: the store cannot be read at present.
        """
        if not self._saved.is_replaced():
            return None
        blob = self._saved.load()
        self.has_changes, self.estimator, self.calibrator = False, SurvivalEstimator(), Calibrator(self._calibration)
        if blob is None:
            return None
        if blob.numbers.get("width") != self._width:
            return f"is of hidden states of width {blob.numbers.get('width')}, not {self._width}"
        try:
            labels = np.frombuffer(blob.data, dtype="<f8").reshape(-1, 3)[-self._calibration.buffer :]
            state = CalibrationState(tuple(map(tuple, labels.tolist())), blob.numbers["steps"])
        except (ValueError, KeyError) as error:
            return f"cannot be read ({error})"
        self.calibrator = Calibrator(self._calibration, state)
        return None

    def save(self) -> None:
        """Save the labels, unless a restore has replaced the saved ones: then `reload` loads those.

        Raises:
            StateError: the labels cannot be saved.
        """
        if self.has_changes and not self._saved.is_replaced():
            state = self.calibrator.state
            labels = np.asarray(state.labels, dtype="<f8").tobytes()
            self._saved.save(labels, {"steps": state.steps, "width": self._width})
            self.has_changes = False


class HeadCheckpoint:
    """Saves the newest state of a head. Any thread may call any method; `reload` never waits for a write."""

    def __init__(self, blobs: BlobStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._saved = SavedBlob(blobs, HEAD_KEY)
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved = b""
        self._saved_at = -HEAD_SAVE_SECONDS

    def update(self, state: bytes) -> None:
        """Set the head's newest state, if ``state`` is not empty; save it if the last save was some time ago."""
        self._unsaved = state or self._unsaved
        if self._unsaved and self._clock() >= self._saved_at + HEAD_SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the newest state, unless a restore has replaced the last one: then `reload` loads that."""
        with self._lock:
            state = self._unsaved
            if not state:
                return
            try:
                if not self._saved.is_replaced():
                    self._saved.save(state, {})
                    self._saved_at = self._clock()
                    if self._unsaved is state:  # a thread may have called `update` during the write
                        self._unsaved = b""
            except StateError as error:
                logger.warning("the quality head was not saved: %s", error)

    def reload(self, restore: Callable[[bytes], None]) -> None:
        """Pass to ``restore`` the head that a restore put into the store; an empty one if there is none any more."""
        if not self._lock.acquire(blocking=False):
            return  # it is being written; the next call will do
        try:
            if self._saved.is_replaced():
                blob = self._saved.load()
                self._unsaved = b""
                restore(b"" if blob is None else blob.data)
        except (InvalidRequest, StateError) as error:
            logger.warning("the saved quality head is not used, and a new one is trained: %s", error)
        finally:
            self._lock.release()
