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
from darts_server.serving.fair_cache import FairCache
from darts_server.types import PruningStatus, SelectedAs

logger = logging.getLogger(__name__)

STEP_GROUPS = 256
"""Rewarded groups of a step while the weights do not change: a usual number of prompts."""
SAVE_SECONDS = 0.3
"""A killed process loses at most the last second."""
RELOAD_SECONDS = 1.0
"""Time between checks for a restore."""
SCORE_BYTES = 500
"""Memory of a trajectory with one score, without its hidden state."""
MISSING_STATE_TOKENS = 64
"""A hidden state that has not arrived this many tokens after the detection point is lost."""
STATUS_REASONS = {
    PruningStatus.READY: "trajectories are pruned by their probability of being correct",
    PruningStatus.UNUSED: "no trajectory was scored yet",
    PruningStatus.NO_LABELS: "no reward was reported for a scored trajectory yet",
    PruningStatus.COLD: "the first steps only learn",
    PruningStatus.FEW_LABELS: "there are too few rewards yet",
    PruningStatus.UNTRAINED: "the quality head is not trained yet",
    PruningStatus.ONE_CLASS: "all labels in memory are of correct trajectories, or all of wrong trajectories",
    PruningStatus.DIVERGED: "the quality head's last training diverged and was undone",
    PruningStatus.TRAINER_LOST: "the process that trains the quality head died too often; restart the server",
    PruningStatus.PROBE_LOST: "the engine no longer sends hidden states; restart the server",
}

CreateHead = Callable[[int, Callable[[bytes], None]], RemoteHead]
"""Creates a head for hidden states of a width. The head calls back with each newly trained state."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingScore:
    """A score at a detection point, after ``tokens`` tokens.

    ``hidden``: the head's input, or None for a score from log-probs.
    ``score``: s', or None if the head was not ready.
    ``quality``: the calibrated q, or None without a calibration.
    """

    point: DetectionPoint
    tokens: int
    hidden: NDArray[np.floating] | None
    score: float | None
    quality: float | None


@dataclass(slots=True, eq=False)
class PendingLabel:
    """A scored trajectory that waits for its reward.

    ``size``: bytes.
    ``survival``: probability to be kept by all scores, and then sampled for the group's tail.
    ``is_undecided``: whether the group may still prune the trajectory.
    """

    scores: list[PendingScore] = field(default_factory=list)
    size: int = 0
    survival: float = 1.0
    is_undecided: bool = False


class Pruner:
    """Scores running trajectories by quality (ARRoL), and learns from their rewards.

    Nothing is loaded before `start` or the first score. `score`, `record_kept` and `record_dropped` are called in the
    event loop, return fast and never raise.

    Args:
        width: returns the width of the engine's hidden states, or None if the engine provides none.
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
        # By group id and candidate index. Limited in bytes.
        self._pending: FairCache[tuple[str, int], PendingLabel] = FairCache(math.inf, settings.max_bytes)
        # By number of tokens.
        self._points: dict[int, DetectionPoint] = {}
        self._head: RemoteHead | None = None
        # For metrics.
        self._score_labels: deque[Label] = deque(maxlen=settings.window)
        self._quality_labels: deque[Label] = deque(maxlen=settings.window)
        self._logged_status: PruningStatus | None = None
        # Weight version at the last rewarded group, and rewarded groups of the present step.
        self._last_version: int | None = None
        self._step_groups = 0
        self._reloaded_at = -math.inf

    def start(self) -> None:
        """Load the learned state, and start to train the head."""
        width = self._width() or 0
        if self._settings.kind is ScoreKind.HEAD_LOGPROB:
            width += LOGPROB_INPUTS
        self._ensure_points_and_head(width)
        self._log_status()

    def close(self) -> None:
        self._save()
        if self._head is not None:
            self._head.close()
            self._checkpoint.save()

    # --- scoring ----------------------------------------------------------------

    @property
    def uses_hidden_states(self) -> bool:
        return self._settings.kind.uses_head

    @property
    def uses_logprobs(self) -> bool:
        return self._settings.kind is not ScoreKind.HEAD

    def score(
        self,
        group: GroupKey,
        index: int,
        state: HiddenState | None,
        logprobs: tuple[float, ...],
        pruning: Pruning,
    ) -> Scored:
        """Return a trajectory's score with its survival probability.

        ``state``: None if the kind of score uses no hidden states.
        ``logprobs``: of the tokens so far, in nats, if the kind uses them.
        """
        kind = self._settings.kind
        hidden_to_keep = None
        if state is None:
            tokens = len(logprobs)
            point = self._last_reached_point(0, tokens)
            value = logprob_score(kind, logprobs)
            # Log-probs that are not finite give a score without a status.
            score = Score(0.5, None) if value is None else Score(value, PruningStatus.READY)
        else:
            tokens = state.tokens
            hidden = head_input(kind, state.vector, logprobs)
            point = self._last_reached_point(hidden.size, tokens)
            assert self._head is not None
            self._observer.hidden_state_expected(received=True)
            score = self._head.score(hidden, tokens)
            hidden_to_keep = reduce_precision(hidden)
        self._log_status()

        # Nothing is pruned before the cold start has ended. Scores that prune nothing do not wait for its end.
        calibration = point.calibrator.status if pruning.prunes else point.calibrator.labels_status
        has_score = score.status is PruningStatus.READY
        calibrated_quality = None
        survival = 1.0
        if has_score and calibration is CalibrationStatus.READY:
            calibrated_quality = point.calibrator.probability(score.value)
            quality = calibrated_quality
            survival = point.estimator.add_quality(quality, pruning)
        elif has_score or calibration is not CalibrationStatus.NO_LABELS:
            # An uncalibrated score is no probability.
            quality = point.calibrator.prior
        else:
            # Without a score, the value is the head's own prior.
            quality = score.value

        is_finite = score.status is not None
        self._observer.trajectory_scored(usable=is_finite)
        if is_finite:
            value_to_keep = score.value if has_score else None
            pending = PendingScore(point, tokens, hidden_to_keep, value_to_keep, calibrated_quality)
            self._keep_score(group, index, pending)
        label = self._find_label(group, index)
        if label is not None:
            label.is_undecided = survival < 1
        return Scored(index, quality, survival)

    def _keep_score(self, group: GroupKey, index: int, score: PendingScore) -> None:
        label = self._find_label(group, index)
        # Tokens never decrease, so this is a new trajectory under a request id that was used before.
        if label is not None and score.tokens <= label.scores[-1].tokens:
            self._pop_label(group, index)
            label = None
        if label is None:
            label = PendingLabel()
        label.scores.append(score)
        label.size += SCORE_BYTES
        if score.hidden is not None:
            label.size += score.hidden.nbytes
        owner, group_id = group
        dropped = self._pending.put(owner, (group_id, index), label, label.size)
        if dropped:
            self._observer.pending_labels_dropped(len(dropped))

    def _find_label(self, group: GroupKey, index: int) -> PendingLabel | None:
        owner, group_id = group
        return self._pending.entries_of(owner).get((group_id, index))

    def _pop_label(self, group: GroupKey, index: int) -> PendingLabel | None:
        owner, group_id = group
        return self._pending.pop(owner, (group_id, index))

    def record_kept(self, group: GroupKey, index: int, survival: float) -> None:
        """``survival``: probability to be kept by all decisions so far."""
        label = self._find_label(group, index)
        if label is not None:
            label.survival = survival
            if label.is_undecided:
                self._observer.pruning_decided(kept=True)
            label.is_undecided = False

    def record_dropped(self, group: GroupKey, index: int) -> None:
        label = self._pop_label(group, index)
        if label is not None and label.is_undecided:
            self._observer.pruning_decided(kept=False)

    # --- learning -------------------------------------------------------------

    def learn_reward(self, group: GroupKey, index: int, correct: bool) -> None:
        """Learn from a trajectory's reward, if its scores are kept."""
        label = self._pop_label(group, index)
        if label is None:
            return
        self._reload_if_due()
        target = float(correct)
        for pending in label.scores:
            score_value = pending.score
            if pending.hidden is not None:
                assert self._head is not None
                if score_value is None:
                    # The head may have become ready.
                    score = self._head.score(pending.hidden, pending.tokens)
                    if score.status is PruningStatus.READY:
                        score_value = score.value
                self._head.learn(pending.hidden, pending.tokens, target, label.survival)
            if score_value is not None:
                score_label = Label(score_value, target, label.survival)
                pending.point.add(score_label)
                self._score_labels.append(score_label)
            if pending.quality is not None:
                self._quality_labels.append(Label(pending.quality, target, label.survival))
        self._observer.label_learned()
        self._save_soon.request()

    def record_rewarded_group(self) -> None:
        previous_version = self._last_version
        self._last_version = self._weight_version()
        self._step_groups += 1
        has_new_weights = previous_version not in (None, self._last_version)
        if not has_new_weights and self._step_groups < STEP_GROUPS:
            return
        self._step_groups = 0
        for point in self._points.values():
            point.count_step()
        self._save_soon.request()

    def group_ended(self, record: GroupRecord) -> None:
        # A trajectory of the tail has also survived the tail's random draw.
        for candidate in record.selected:
            label = self._find_label(record.key, candidate.index)
            if label is not None and candidate.selected_as is not SelectedAs.SHORT:
                label.survival *= record.tail_share
        self._log_status()
        if self.uses_hidden_states:
            missing_after = self.detect_at[0] + MISSING_STATE_TOKENS
            for candidate in record.candidates:
                if candidate.quality is None and candidate.tokens > missing_after:
                    self._observer.hidden_state_expected(received=False)

    # --- status and metrics ---------------------------------------------------

    @property
    def status(self) -> PruningStatus:
        """``READY`` if any detection point prunes; otherwise why the first point does not."""
        if not self._points:
            return PruningStatus.UNUSED
        if self.uses_hidden_states and self._width() is None:
            return PruningStatus.PROBE_LOST
        if self._head is not None and self._head.status is not PruningStatus.READY:
            return self._head.status
        statuses = [point.calibrator.status for point in self._points.values()]
        if CalibrationStatus.READY in statuses:
            return PruningStatus.READY
        status_of_first = statuses[0]
        # All labels had no score, before the head's first training.
        if status_of_first is CalibrationStatus.NO_LABELS and self.report.labels:
            return PruningStatus.FEW_LABELS
        return PruningStatus(status_of_first.value)

    def _log_status(self) -> None:
        status = self.status
        if status is not self._logged_status:
            self._logged_status = status
            effect = "" if status is PruningStatus.READY else " and all are kept"
            # By default vLLM shows only warnings of our loggers.
            logger.warning("pruning by quality is %s%s: %s", status, effect, STATUS_REASONS[status])

    @property
    def report(self) -> TrainerReport:
        return TrainerReport() if self._head is None else self._head.report

    def score_metrics(self) -> ScoreMetrics:
        """Evaluate scores on labels that they were not trained on."""
        return evaluate(self._score_labels) if self._head is None else self._head.report.metrics

    def calibrated_metrics(self) -> ScoreMetrics:
        """Evaluate calibrated scores on labels that were reported after them."""
        return evaluate(self._quality_labels)

    # --- detection points, head and store -------------------------------------

    def _last_reached_point(self, width: int, tokens: int) -> DetectionPoint:
        self._ensure_points_and_head(width)
        self._reload_if_due()
        reached = [at for at in self.detect_at if at <= tokens]
        return self._points[max(reached, default=self.detect_at[0])]

    def _ensure_points_and_head(self, width: int) -> None:
        if self._points:
            return
        kind = self._settings.kind
        for at in self.detect_at:
            self._points[at] = DetectionPoint(self._blobs, f"{kind}@{at}", self._settings.calibration, width)
        if kind.uses_head:
            self._head = self._create_head(width, self._checkpoint.update)
        self._reload_if_due()
        if self._head is not None:
            self._head.start()

    def _reload_if_due(self) -> None:
        """Load what a restore has replaced in the store."""
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


def reduce_precision(hidden: NDArray[np.floating]) -> NDArray[np.floating]:
    # States that were bfloat16 lose next to nothing at half precision, unless a value overflows.
    with np.errstate(over="ignore"):
        half = hidden.astype(np.float16)
    return half if np.isfinite(half).all() else hidden.astype(np.float32)
