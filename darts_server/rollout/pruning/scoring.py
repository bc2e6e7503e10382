import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from darts_server.estimates.calibration import Calibration, Calibrator, Label
from darts_server.estimates.score_metrics import WINDOW
from darts_server.exceptions import InvalidRequest, StateDamaged
from darts_server.policy.survival import Pruning, SurvivalCurve
from darts_server.rollout.learned.documents import Blob, BlobStore

logger = logging.getLogger(__name__)

LOWEST_WINDOW = 64
"""A few sentences: several windows fit before a usual detection point."""
MAX_PENDING_BYTES = 256 * 1024 * 1024
"""At a width of 4096 some 30,000 trajectories, of several steps."""
QUALITY_BLOBS = "quality"
VOTE_BLOBS = "vote"
HEAD_KEY = "head"
HEAD_SAVE_SECONDS = 10.0
"""A write has up to 13 MB. A killed process loses this much training of the head."""
RECENT_QUALITIES = 1024
"""Qualities that a survival curve is fitted to: several usual steps."""
FIT_INTERVAL = 32
"""Qualities between two fits of a curve. A fit takes half a millisecond."""
MAX_CURVES = 16
"""Each caller may send its own pruning settings."""
LOGPROB_INPUTS = 2


class ScoreKind(StrEnum):
    """The inputs of a score: hidden states, log-probs, or both."""

    HEAD = "head"
    HEAD_LOGPROB = "head+logprob"
    LOGPROB = "logprob"
    """The mean log-prob of all tokens."""
    LOWEST_LOGPROB = "lowest_logprob"
    """The lowest mean log-prob of `LOWEST_WINDOW` consecutive tokens, or of fewer tokens (the idea of DeepConf)."""

    @property
    def uses_head(self) -> bool:
        return self in (ScoreKind.HEAD, ScoreKind.HEAD_LOGPROB)


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """``detect_at``: numbers of tokens, ascending. The latest score counts.
    ``max_bytes``: memory of hidden states that wait for a reward.
    ``window``: number of labels for metrics.
    """

    detect_at: tuple[int, ...] = (512,)
    kind: ScoreKind = ScoreKind.HEAD
    calibration: Calibration = field(default_factory=Calibration)
    max_bytes: int = MAX_PENDING_BYTES
    window: int = WINDOW


def head_input(kind: ScoreKind, state: NDArray[np.float32], logprobs: tuple[float, ...]) -> NDArray[np.float32]:
    """Return the hidden state and, if the kind uses both, the mean and lowest log-prob in nats."""
    if kind is not ScoreKind.HEAD_LOGPROB:
        return state
    # The head scores no input that has a NaN.
    mean = math.nan
    lowest = math.nan
    usable = _usable_logprobs(logprobs)
    if usable is not None:
        mean = usable.mean()
        lowest = usable.min()
    return np.append(state, np.asarray([mean, lowest], dtype=np.float32))


def logprob_score(kind: ScoreKind, logprobs: tuple[float, ...]) -> float | None:
    """Return the geometric mean of all probabilities, or of the lowest window; None without finite log-probs."""
    usable = _usable_logprobs(logprobs)
    if usable is None:
        return None
    if kind is ScoreKind.LOWEST_LOGPROB:
        windows = np.lib.stride_tricks.sliding_window_view(usable, min(LOWEST_WINDOW, usable.size))
        return math.exp(windows.mean(axis=1).min())
    return math.exp(usable.mean())


def _usable_logprobs(logprobs: tuple[float, ...]) -> NDArray[np.float64] | None:
    # Rounding can put a log-softmax slightly above 0.
    clipped = np.minimum(np.asarray(logprobs, dtype=np.float64), 0.0)
    if clipped.size and np.isfinite(clipped).all():
        return clipped
    return None


# --- saving -----------------------------------------------------------------


class SavedBlob:
    """A blob that a restore may replace in the store."""

    def __init__(self, blobs: BlobStore, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._last_digest: str | None = None

    def save(self, data: bytes, numbers: Mapping[str, int]) -> bool:
        """Return whether the blob was saved."""
        # With another digest, a restore has replaced the blob, and `data` belongs to the older state.
        if self._blobs.digest(self._key) != self._last_digest:
            return False
        self._last_digest = self._blobs.save(self._key, data, numbers)
        return True

    def reload(self, restore: Callable[[Blob | None], None]) -> None:
        """Pass a replaced blob to ``restore``, or None if it is missing."""
        stored_digest = self._blobs.digest(self._key)
        if stored_digest != self._last_digest:
            blob = self._blobs.load(self._key)
            self._last_digest = stored_digest
            restore(blob)


class DetectionPoint:
    """Calibrates a kind of score after a number of tokens.

    ``width``: width of the head's input, or 0 for log-probs. Saved labels of another width are of another model.
    """

    def __init__(
        self,
        blobs: BlobStore,
        key: str,
        calibration: Calibration,
        width: int,
        name: str | None = None,
    ) -> None:
        self._saved = SavedBlob(blobs, key)
        self._name = name or key
        self._calibration = calibration
        self._width = width
        self._restore(None)

    def _restore(self, blob: Blob | None) -> None:
        self._has_changes = False
        self.estimator = SurvivalEstimator()
        self.calibrator = Calibrator(self._calibration)
        if blob is None:
            return
        try:
            width = blob.numbers.get("width")
            if width != self._width:
                raise ValueError(f"it is of hidden states of width {width}, not {self._width}")
            # A row is a label. The newest labels are last.
            rows = np.frombuffer(blob.data, dtype="<f8").reshape(-1, 3)[-self._calibration.buffer :]
            labels = [Label(*row) for row in rows.tolist()]
            self.calibrator = Calibrator(self._calibration, labels, blob.numbers["steps"])
        except (ValueError, KeyError) as error:
            logger.warning("the saved calibration %s cannot be used, and is learned again: %s", self._name, error)

    def add(self, label: Label) -> None:
        self.calibrator.add(label)
        self._has_changes = True

    def count_step(self) -> None:
        self.calibrator.steps += 1
        self._has_changes = True

    def reload(self) -> None:
        self._saved.reload(self._restore)

    def save(self) -> None:
        """Save the labels, unless a restore has replaced them."""
        if self._has_changes:
            rows = [(label.score, label.target, label.survival) for label in self.calibrator.labels]
            numbers = {"steps": self.calibrator.steps, "width": self._width}
            is_saved = self._saved.save(np.asarray(rows, dtype="<f8").tobytes(), numbers)
            self._has_changes = not is_saved


class HeadCheckpoint:
    """The saved state of a head.

    `update` is called in the head's thread, `save` after this thread has ended, and `reload` in any thread.
    """

    def __init__(self, blobs: BlobStore, clock: Callable[[], float]) -> None:
        self._saved = SavedBlob(blobs, HEAD_KEY)
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved = b""
        self._saved_at = -HEAD_SAVE_SECONDS

    def update(self, state: bytes) -> None:
        """Set the newest state, unless ``state`` is empty, and save it every `HEAD_SAVE_SECONDS`."""
        if state:
            self._unsaved = state
        if self._clock() >= self._saved_at + HEAD_SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        with self._lock:
            if self._unsaved and self._saved.save(self._unsaved, {}):
                self._saved_at = self._clock()
                self._unsaved = b""

    def reload(self, restore: Callable[[bytes], None]) -> None:
        """Pass a replaced state to ``restore``, or b"" if it is missing."""

        def restore_head(blob: Blob | None) -> None:
            self._unsaved = b""
            restore(b"" if blob is None else blob.data)

        # The event loop never waits for a write. After the write, the next call loads the state.
        if self._lock.acquire(blocking=False):
            try:
                self._saved.reload(restore_head)
            except (InvalidRequest, StateDamaged) as error:
                logger.warning("the saved quality head is not used, and a new one is trained: %s", error)
            finally:
                self._lock.release()


class SurvivalEstimator:
    """Fits curves to recent qualities."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_QUALITIES)
        self._num_qualities = 0
        # Curves, with the number of qualities at their last fit, in order of use.
        self._curves: dict[Pruning, tuple[SurvivalCurve, int]] = {}

    def add_quality(self, quality: float, pruning: Pruning) -> float:
        """Return the probability to keep a trajectory."""
        self._recent.append(quality)
        self._num_qualities += 1

        # Among few qualities, each changes the curve.
        curve, fitted_at = self._curves.pop(pruning, (None, 0))
        fit_interval = min(FIT_INTERVAL, 1 + fitted_at // 4)
        if curve is None or self._num_qualities - fitted_at >= fit_interval:
            curve = pruning.fit(np.asarray(self._recent))
            fitted_at = self._num_qualities

        self._curves[pruning] = (curve, fitted_at)
        if len(self._curves) > MAX_CURVES:
            least_recently_used = next(iter(self._curves))
            del self._curves[least_recently_used]
        return curve.survival(quality)
