"""How trajectories are scored, what calibrates the scores at detection points, and how both are saved."""

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
"""In tokens: a few sentences. A detection point at some hundred tokens sees several windows."""
MAX_PENDING_BYTES = 256 * 1024 * 1024
"""At a width of 4096 some 30,000 trajectories: the groups of several steps."""
QUALITY_BLOBS, VOTE_BLOBS = "quality", "vote"
"""Kinds of blobs: what scores candidates, and what calibrates votes."""
HEAD_KEY = "head"
HEAD_SAVE_SECONDS = 10.0
"""Between two writes of up to 13 MB. A killed process loses that much training of the head."""
RECENT_QUALITIES = 1024
"""Qualities that a survival curve is fitted to, pruned trajectories included: several steps with a usual batch size."""
FIT_INTERVAL = 32
"""Qualities between two fits of a curve. One fit takes half a millisecond."""
MAX_CURVES = 16
"""Pruning settings whose curve is cached; each caller may send its own."""
LOGPROB_INPUTS = 2
"""Of a head that has log-probs as inputs too: see `head_input`."""


class ScoreKind(StrEnum):
    """The inputs of a score: hidden states, log-probs, or both."""

    HEAD = "head"
    HEAD_LOGPROB = "head+logprob"
    LOGPROB = "logprob"
    """The mean log-prob of all tokens."""
    LOWEST_LOGPROB = "lowest_logprob"
    """The lowest mean log-prob of any `LOWEST_WINDOW` tokens in a row (the idea of DeepConf); of fewer, that of all."""

    @property
    def uses_head(self) -> bool:
        """Whether a quality head computes it, which must be trained and needs hidden states."""
        return self in (ScoreKind.HEAD, ScoreKind.HEAD_LOGPROB)


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """How trajectories are scored.

    ``detect_at``: numbers of tokens, ascending, at which trajectories are scored. ``kind``: what the scores are made
    from. ``max_bytes``: limit for the hidden states that wait for a reward. ``window``: number of labels that metrics
    are computed over.
    """

    detect_at: tuple[int, ...] = (512,)
    kind: ScoreKind = ScoreKind.HEAD
    calibration: Calibration = field(default_factory=Calibration)
    max_bytes: int = MAX_PENDING_BYTES
    window: int = WINDOW


def head_input(kind: ScoreKind, state: NDArray[np.float32], logprobs: tuple[float, ...]) -> NDArray[np.float32]:
    """Assemble the head's input: the hidden state and, if the kind uses both, the mean and lowest log-prob, in nats.

    The two are NaN where there are no log-probs, or some are not finite.
    """
    if kind is not ScoreKind.HEAD_LOGPROB:
        return state
    usable = _usable_logprobs(logprobs)
    both = (math.nan, math.nan) if usable is None else (usable.mean(), usable.min())
    return np.append(state, np.asarray(both, dtype=np.float32))


def logprob_score(kind: ScoreKind, logprobs: tuple[float, ...]) -> float | None:
    """Compute a score in [0, 1] from log-probs; ``None`` if there are none, or some are not finite.

    It is the exponential of a mean log-prob: the geometric mean of the tokens' probabilities. It needs no reward, and
    separates right from wrong less well than a trained head.
    """
    usable = _usable_logprobs(logprobs)
    if usable is None:
        return None
    if kind is ScoreKind.LOWEST_LOGPROB:
        windows = np.lib.stride_tricks.sliding_window_view(usable, min(LOWEST_WINDOW, usable.size))
        return math.exp(windows.mean(axis=1).min())
    return math.exp(usable.mean())


def _usable_logprobs(logprobs: tuple[float, ...]) -> NDArray[np.float64] | None:
    clipped = np.minimum(np.asarray(logprobs, dtype=np.float64), 0.0)  # rounding can put a log-softmax slightly above 0
    return clipped if clipped.size and np.isfinite(clipped).all() else None


# --- saving -----------------------------------------------------------------


class SavedBlob:
    """A blob that a restore may replace in the store: then it is loaded, and what was learned before is not saved."""

    def __init__(self, blobs: BlobStore, key: str) -> None:
        self._blobs = blobs
        self._key = key
        self._digest: str | None = None

    def save(self, data: bytes, numbers: Mapping[str, int]) -> bool:
        """Save, unless a restore has replaced what was saved or loaded last; return whether it was saved."""
        if self._blobs.digest(self._key) != self._digest:
            return False
        self._digest = self._blobs.save(self._key, data, numbers)
        return True

    def reload(self, restore: Callable[[Blob | None], None]) -> None:
        """Pass to ``restore`` what a restore has put into the store; ``None`` if there is nothing any more."""
        digest = self._blobs.digest(self._key)
        if digest != self._digest:
            blob = self._blobs.load(self._key)
            self._digest = digest
            restore(blob)


class DetectionPoint:
    """Calibrates one kind of score after one number of tokens. Its labels are saved in ``blobs`` under ``key``.

    ``width``: of the hidden states that scores are made from; 0 for log-probs. Saved labels with another width are of
    another model, and are not loaded. ``name``: in the log, the key by default.
    """

    def __init__(
        self, blobs: BlobStore, key: str, calibration: Calibration, width: int, name: str | None = None
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
            if (width := blob.numbers.get("width")) != self._width:
                raise ValueError(f"it is of hidden states of width {width}, not {self._width}")
            labels = np.frombuffer(blob.data, dtype="<f8").reshape(-1, 3)[-self._calibration.buffer :]
            restored = [Label(*label) for label in labels.tolist()]
            self.calibrator = Calibrator(self._calibration, restored, blob.numbers["steps"])
        except (ValueError, KeyError) as error:
            logger.warning("the saved calibration %s cannot be used, and is learned again: %s", self._name, error)

    def add(self, label: Label) -> None:
        self.calibrator.add(label)
        self._has_changes = True

    def count_step(self) -> None:
        """Count one more step of the trainer."""
        self.calibrator.steps += 1
        self._has_changes = True

    def reload(self) -> None:
        """Load the labels that a restore put into the store."""
        self._saved.reload(self._restore)

    def save(self) -> None:
        """Save the labels, unless a restore has replaced the saved ones: then `reload` loads those."""
        if self._has_changes:
            labels = [(x.score, x.target, x.survival) for x in self.calibrator.labels]
            numbers = {"steps": self.calibrator.steps, "width": self._width}
            self._has_changes = not self._saved.save(np.asarray(labels, dtype="<f8").tobytes(), numbers)


class HeadCheckpoint:
    """Saves the newest state of a head: `update` in the head's thread, `save` once that has ended, `reload` in any."""

    def __init__(self, blobs: BlobStore, clock: Callable[[], float]) -> None:
        self._saved = SavedBlob(blobs, HEAD_KEY)
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved = b""
        self._saved_at = -HEAD_SAVE_SECONDS

    def update(self, state: bytes) -> None:
        """Set the head's newest state, if ``state`` is not empty; save it if the last save was some time ago."""
        if state:
            self._unsaved = state
        if self._clock() >= self._saved_at + HEAD_SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the newest state, unless a restore has replaced the last one: then `reload` loads that."""
        with self._lock:
            if self._unsaved and self._saved.save(self._unsaved, {}):
                self._saved_at, self._unsaved = self._clock(), b""

    def reload(self, restore: Callable[[bytes], None]) -> None:
        """Pass to ``restore`` the head that a restore put into the store; an empty one if there is none any more.

        It never waits for a write: then the next call loads it.
        """

        def replace(blob: Blob | None) -> None:
            self._unsaved = b""
            restore(b"" if blob is None else blob.data)

        if self._lock.acquire(blocking=False):
            try:
                self._saved.reload(replace)
            except (InvalidRequest, StateDamaged) as error:
                logger.warning("the saved quality head is not used, and a new one is trained: %s", error)
            finally:
                self._lock.release()


class SurvivalEstimator:
    """Computes survival probabilities from curves that are fitted to the recent qualities."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_QUALITIES)
        self._seen = 0
        self._curves: dict[Pruning, tuple[SurvivalCurve, int]] = {}  # the ones used last come last

    def survival(self, quality: float, pruning: Pruning) -> float:
        """Add a trajectory's quality, and return the probability with which to keep the trajectory."""
        self._recent.append(quality)
        self._seen += 1
        curve, fitted_at = self._curves.pop(pruning, (None, 0))
        # Among few qualities each one changes the curve, so early fits are closer together.
        if curve is None or self._seen - fitted_at >= min(FIT_INTERVAL, 1 + fitted_at // 4):
            curve, fitted_at = pruning.fit(np.asarray(self._recent)), self._seen
        self._curves[pruning] = curve, fitted_at
        if len(self._curves) > MAX_CURVES:
            del self._curves[next(iter(self._curves))]
        return curve.survival(quality)
