"""Scores running trajectories by quality (ARRoL), and learns from the rewards that come for them."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from darts_server.engine.port import HiddenState
from darts_server.estimates.calibration import CalibrationStatus, Label
from darts_server.estimates.score_metrics import ScoreMetrics, evaluate
from darts_server.group.events import Scored
from darts_server.observers import PruningObserver
from darts_server.policy.survival import Pruning
from darts_server.quality.remote import RemoteHead
from darts_server.quality.types import Score, TrainerReport
from darts_server.records import GroupKey, GroupRecord
from darts_server.rollout.learned.documents import BlobStore, Debounce, DocumentStore
from darts_server.rollout.pruning.scoring import (
    LOGPROB_INPUTS,
    QUALITY_BLOBS,
    DetectionPoint,
    HeadCheckpoint,
    ScoreKind,
    ScoringSettings,
    head_input,
    logprob_score,
)
from darts_server.serving.kept import Kept
from darts_server.types import PruningStatus, SelectedAs

logger = logging.getLogger(__name__)

STEP_GROUPS = 256
"""Groups with rewards that count as one step while the weights never change: a usual number of prompts per step."""
SAVE_SECONDS = 0.3
"""From learning to saving; the store takes half a second more, so a killed process loses at most the last second."""
RELOAD_SECONDS = 1.0
"""Between two checks whether a restore has replaced what is in the store."""
SCORE_BYTES = 500
"""Of a trajectory with one score, without its hidden state; an estimate."""
MISSING_STATE_TOKENS = 64
"""Without a score this many tokens past its detection point, a trajectory's hidden state will not come any more."""
STATUS_REASONS = {
    PruningStatus.READY: "trajectories are pruned by their probability of being correct",
    PruningStatus.UNUSED: "no trajectory was scored yet",
    PruningStatus.NO_LABELS: "no reward was reported for a scored trajectory yet",
    PruningStatus.COLD: "the first steps only learn",
    PruningStatus.FEW_LABELS: "there are too few rewards yet",
    PruningStatus.UNTRAINED: "the quality head is not trained yet",
    PruningStatus.ONE_CLASS: "all labels in memory are of correct trajectories, or all are of wrong ones",
    PruningStatus.DIVERGED: "the quality head's last training diverged and was undone",
    PruningStatus.TRAINER_LOST: "the process that trains the quality head died too often; restart the server",
    PruningStatus.PROBE_LOST: "the engine no longer sends hidden states; restart the server",
}

CreateHead = Callable[[int, Callable[[bytes], None]], RemoteHead]
"""Creates a head for hidden states of that width, which passes each newly trained state to the callback."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingScore:
    """A score at a detection point, after ``tokens`` tokens. ``hidden``: what it was made from, unless from log-probs.

    ``score``: s'. ``quality``: the calibrated q. Both are ``None`` if they could not be trusted.
    """

    point: DetectionPoint
    tokens: int
    hidden: NDArray[np.floating] | None
    score: float | None
    quality: float | None


@dataclass(slots=True, eq=False)
class PendingLabel:
    """A scored trajectory without a reward yet. ``size``: in bytes.

    ``survival``: the probability with which it was kept, over all scores, and was sampled from the survivors for the
    tail of its group. ``is_undecided``: whether the last score allows it to be pruned and the group has not decided
    yet.
    """

    scores: list[PendingScore] = field(default_factory=list)
    size: int = 0
    survival: float = 1.0
    is_undecided: bool = False


class Pruner:
    """Score trajectories, identified by their group and candidate index, and learn from their rewards.

    Nothing is loaded or started before the first trajectory is scored, or before `start`. `score`, `record_kept`
    and `record_dropped` are called in the event loop, return fast and never raise.

    ``detect_at``: numbers of generated tokens, ascending, at which trajectories are scored; the latest score counts.

    Args:
        settings: how trajectories are scored.
        width: returns the width of the engine's hidden states; ``None`` while the engine cannot provide any.
        create_head: creates the quality head.
        documents: where everything learned is saved.
        weight_version: returns the served version of the weights.
        observer: is notified of scores and labels.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: ScoringSettings,
        width: Callable[[], int | None],
        create_head: CreateHead,
        documents: DocumentStore,
        weight_version: Callable[[], int],
        observer: PruningObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.detect_at = settings.detect_at
        self._settings = settings
        self._width = width
        self._create_head = create_head
        self._blobs = BlobStore(documents, QUALITY_BLOBS)
        self._checkpoint = HeadCheckpoint(self._blobs, clock)
        self._weight_version = weight_version
        self._observer = observer
        self._clock = clock
        self._save_soon = Debounce(SAVE_SECONDS, self._save)
        # By group id and candidate index; by number of bytes.
        self._pending: Kept[tuple[str, int], PendingLabel] = Kept(math.inf, settings.max_bytes)
        self._points: dict[tuple[ScoreKind, int], DetectionPoint] = {}
        self._head: RemoteHead | None = None
        self._scored: deque[Label] = deque(maxlen=settings.window)  # scores with their rewards, for metrics
        self._calibrated: deque[Label] = deque(maxlen=settings.window)  # the same of qualities
        self._logged_status: PruningStatus | None = None
        self._last_version: int | None = None
        self._step_groups = 0
        self._reloaded_at = -math.inf

    def start(self) -> None:
        """Load what was learned before, and start the training of the head, for which the engine must have a width."""
        inputs = LOGPROB_INPUTS if self._settings.kind is ScoreKind.HEAD_LOGPROB else 0
        self._ensure_points(self._settings.kind, (self._width() or 0) + inputs)
        self._log_status()

    def close(self) -> None:
        """Save what was learned, and end the training."""
        self._save()
        if self._head is not None:
            self._head.close()
            self._checkpoint.save()

    # --- scoring ----------------------------------------------------------------

    @property
    def uses_hidden_states(self) -> bool:
        """Whether scores are made from hidden states, alone or together with log-probs."""
        return self._settings.kind.uses_head

    @property
    def uses_logprobs(self) -> bool:
        return self._settings.kind is not ScoreKind.HEAD

    def score(
        self, group: GroupKey, index: int, probed: HiddenState | None, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Scored:
        """Score a trajectory, remember the score until its reward comes, and compute the survival probability.

        The kind of the scores decides what a trajectory is scored by: its hidden state ``probed``, the log-probs of
        its tokens so far, in nats, or both. ``probed`` is ``None`` where the kind uses no hidden states.
        """
        kind, stored = self._settings.kind, None
        if probed is None:
            tokens = len(logprobs)
            point = self._last_point(kind, 0, tokens)
            value = logprob_score(kind, logprobs)
            score = Score(0.5, None) if value is None else Score(value, PruningStatus.READY)
        else:
            hidden, tokens = head_input(kind, probed.vector, logprobs), probed.tokens
            point = self._last_point(kind, hidden.size, tokens)
            assert self._head is not None
            self._observer.hidden_state_expected(received=True)
            score = self._head.score(hidden, tokens)
            stored = compact(hidden)
        self._log_status()
        is_ready = score.status is PruningStatus.READY
        # The cold start keeps a young head from pruning; scores that prune nothing do not wait for it.
        calibration = point.calibrator.status if pruning.prunes else point.calibrator.labels_status
        trusted, calibrated = score.value if is_ready else None, None
        quality, survival = score.value, 1.0
        if is_ready and calibration is CalibrationStatus.READY:
            calibrated = quality = point.calibrator.probability(score.value)
            survival = point.estimator.survival(quality, pruning)
        elif is_ready or calibration is not CalibrationStatus.NO_LABELS:
            quality = point.calibrator.prior
        usable = score.status is not None
        self._observer.trajectory_scored(usable=usable)
        if usable:
            self._remember(group, index, PendingScore(point, tokens, stored, trusted, calibrated))
        if (label := self._find(group, index)) is not None:
            label.is_undecided = survival < 1
        return Scored(index, quality, survival)

    def _remember(self, group: GroupKey, index: int, score: PendingScore) -> None:
        """Store a score until the reward of its trajectory comes; the oldest of the caller that has most make room."""
        label = self._find(group, index)
        if label is not None and score.tokens <= label.scores[-1].tokens:
            self._pop(group, index)  # tokens never decrease, so a caller used its request id again
            label = None
        if label is None:
            label = PendingLabel()
        label.scores.append(score)
        label.size += SCORE_BYTES + (0 if score.hidden is None else score.hidden.nbytes)
        owner, group_id = group
        if dropped := self._pending.put(owner, (group_id, index), label, label.size):
            self._observer.pending_labels_dropped(len(dropped))

    def _find(self, group: GroupKey, index: int) -> PendingLabel | None:
        owner, group_id = group
        return self._pending.of(owner).get((group_id, index))

    def _pop(self, group: GroupKey, index: int) -> PendingLabel | None:
        owner, group_id = group
        return self._pending.pop(owner, (group_id, index))

    def record_kept(self, group: GroupKey, index: int, survival: float) -> None:
        """Record that a trajectory was kept, and with which probability it was kept so far, over all decisions."""
        label = self._find(group, index)
        if label is not None:
            label.survival = survival
            if label.is_undecided:
                self._observer.pruning_decided(kept=True)
            label.is_undecided = False

    def record_dropped(self, group: GroupKey, index: int) -> None:
        """Record that a trajectory will not be returned, so that no reward will come for it."""
        label = self._pop(group, index)
        if label is not None and label.is_undecided:
            self._observer.pruning_decided(kept=False)

    # --- learning -------------------------------------------------------------

    def learn_reward(self, group: GroupKey, index: int, correct: bool) -> None:
        """Learn whether a trajectory is correct, if it was scored."""
        label = self._pop(group, index)
        if label is None:
            return
        self._reload()
        target = float(correct)
        for pending in label.scores:
            value = pending.score
            if pending.hidden is not None:
                assert self._head is not None
                if value is None:  # the head may be ready by now
                    score = self._head.score(pending.hidden, pending.tokens)
                    value = score.value if score.status is PruningStatus.READY else None
                self._head.learn(pending.hidden, pending.tokens, target, label.survival)
            if value is not None:
                learned = Label(value, target, label.survival)
                pending.point.add(learned)
                self._scored.append(learned)
            if pending.quality is not None:
                self._calibrated.append(Label(pending.quality, target, label.survival))
        self._observer.label_learned()
        self._save_soon.request()

    def record_rewarded_group(self) -> None:
        """Record that all trajectories of a group have rewards, which may complete a step of the trainer.

        A step is complete when the weight version has changed, or after `STEP_GROUPS` groups.
        """
        version, last = self._weight_version(), self._last_version
        self._last_version = version
        self._step_groups += 1
        if last in (None, version) and self._step_groups < STEP_GROUPS:
            return
        self._step_groups = 0
        for point in self._points.values():
            point.count_step()
        self._save_soon.request()

    def group_ended(self, record: GroupRecord) -> None:
        """Note what returned trajectories of a scored group stand for, and count missing hidden states."""
        for candidate in record.selected:
            label = self._find(record.key, candidate.index)
            if label is not None and candidate.selected_as is not SelectedAs.SHORT:
                label.survival *= record.tail_share
        self._log_status()
        if self.uses_hidden_states:
            for candidate in record.candidates:
                if candidate.quality is None and candidate.tokens > self.detect_at[0] + MISSING_STATE_TOKENS:
                    self._observer.hidden_state_expected(received=False)

    # --- status and metrics ---------------------------------------------------

    @property
    def status(self) -> PruningStatus:
        """``READY`` if any detection point prunes; otherwise the reason why the first one does not."""
        kind = self._settings.kind
        head = self._head if kind.uses_head else None
        if not self._points:
            return PruningStatus.UNUSED
        if kind.uses_head and self._width() is None:
            return PruningStatus.PROBE_LOST
        if head is not None and head.status is not PruningStatus.READY:
            return head.status
        statuses = [point.calibrator.status for (of, _), point in self._points.items() if of is kind]
        if not statuses:
            return PruningStatus.UNUSED
        if CalibrationStatus.READY in statuses:
            return PruningStatus.READY
        if statuses[0] is CalibrationStatus.NO_LABELS and head is not None and head.report.labels:
            return PruningStatus.FEW_LABELS  # all labels are from before the head's first training, and had no score
        return PruningStatus(statuses[0].value)

    def _log_status(self) -> None:
        """Log the status if it has changed."""
        status = self.status
        if status is not self._logged_status:
            neutral = "" if status is PruningStatus.READY else " and all are kept"
            # A warning, since vLLM's default logging shows nothing below of loggers other than its own.
            logger.warning("pruning by quality is %s%s: %s", status, neutral, STATUS_REASONS[status])
        self._logged_status = status

    @property
    def report(self) -> TrainerReport:
        """The last report of the head's trainer."""
        return TrainerReport() if self._head is None else self._head.report

    def score_metrics(self) -> ScoreMetrics:
        """How good scores are, on labels that they were not trained on."""
        if self._head is None or not self.uses_hidden_states:
            return evaluate(self._scored)
        return self._head.report.metrics

    def calibrated_metrics(self) -> ScoreMetrics:
        """How good calibrated scores are, on labels that came after them."""
        return evaluate(self._calibrated)

    # --- detection points, head and store -------------------------------------

    def _last_point(self, kind: ScoreKind, width: int, tokens: int) -> DetectionPoint:
        """Return the last detection point at or before ``tokens``."""
        self._ensure_points(kind, width)
        self._reload()
        at = max((at for at in self.detect_at if at <= tokens), default=self.detect_at[0])
        return self._points[kind, at]

    def _ensure_points(self, kind: ScoreKind, width: int) -> None:
        """Create the detection points of a kind of score, unless they exist, and start the head that they need."""
        if (kind, self.detect_at[0]) in self._points:
            return
        for at in self.detect_at:
            self._points[kind, at] = DetectionPoint(self._blobs, f"{kind}@{at}", self._settings.calibration, width)
        if kind.uses_head:
            self._head = self._create_head(width, self._checkpoint.update)
        self._reloaded_at = -math.inf
        self._reload()
        if self._head is not None:
            self._head.start()

    def _reload(self) -> None:
        """Load what a restore has put into the store."""
        now = self._clock()
        if now >= self._reloaded_at + RELOAD_SECONDS:
            self._reloaded_at = now
            for point in self._points.values():
                point.reload()
            if self._head is not None:
                self._checkpoint.reload(self._head.restore)

    def _save(self) -> None:
        for point in self._points.values():
            point.save()


def compact(hidden: NDArray[np.floating]) -> NDArray[np.floating]:
    """Copy at half precision if all values fit its range; states that were bfloat16 lose next to nothing."""
    with np.errstate(over="ignore"):
        half = hidden.astype(np.float16)
    return half if np.isfinite(half).all() else hidden.astype(np.float32)
