"""Judges running trajectories by quality (ARRoL), and learns from the rewards that come for them."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from darts_server.engine.port import Probed
from darts_server.exceptions import StateError
from darts_server.observers import GroupObserver, PruningObserver
from darts_server.policy.pruning.calibration import CalibrationStatus as CalibrationStatus
from darts_server.policy.pruning.calibration import Label
from darts_server.policy.pruning.survival import Pruning
from darts_server.quality.evaluation import Evaluation, ScoreMetrics
from darts_server.quality.report import TrainerReport
from darts_server.quality.types import HeadStatus, Score
from darts_server.rollout.debounce import Debounce
from darts_server.rollout.learned.blobs import BlobStore
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.pruning.detection_point import DetectionPoint, DetectionPoints, points, reached
from darts_server.rollout.pruning.head_checkpoint import HeadCheckpoint
from darts_server.rollout.pruning.pending_labels import PendingLabels, PendingScore, compact
from darts_server.rollout.pruning.score_kinds import (
    STATUS_REASONS,
    ScoreKind,
    ScoringSettings,
    features,
    logprob_score,
    width_of,
)
from darts_server.rollout.pruning.scorer import Assessment
from darts_server.types import GroupRecord, PruningStatus

logger = logging.getLogger(__name__)

KIND = "quality"
STEP_GROUPS = 256
"""Groups with rewards that make a step where the weights never change: a usual number of prompts."""
KEEP_SECONDS = 0.3
"""From what is learned to the store, which takes half a second more: a killed process loses the last second at most."""
REFRESH_SECONDS = 1.0
"""Between two looks for what a restore has put into the store."""
UNPROBED_TOKENS = 64
"""Past its detection point, without a score: the state of such a trajectory is not on its way any more."""


class TrainedHead(Protocol):
    """The part of the quality head that is used here."""

    @property
    def report(self) -> TrainerReport: ...

    @property
    def status(self) -> HeadStatus: ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def score(self, hidden: NDArray[np.floating], position: int) -> Score: ...

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool: ...

    def restore(self, data: bytes) -> None: ...


NewHead = Callable[[int, Callable[[bytes], None]], TrainedHead]
"""Makes the head for hidden states of some width; it tells of each state that it is trained to."""


class Pruner(GroupObserver):
    """Implements the judge, and hears of rewards and of groups that ended.

    Nothing is loaded or started before the first trajectory is to be scored, or `begin`.

    Args:
        judging: how trajectories are judged.
        width: asks the engine for the width of its hidden states, which is ``None`` when it cannot tell them.
        new_head: makes the head.
        documents: where what is learned is kept.
        weight_version: asks for the one that is served.
        observer: hears of scores and labels.
        prunes: whether a policy of that name prunes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        judging: ScoringSettings,
        width: Callable[[], int | None],
        new_head: NewHead,
        documents: DocumentStore,
        weight_version: Callable[[], int],
        observer: PruningObserver,
        prunes: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._judging = judging
        self._width = width
        self._new_head = new_head
        self._blobs = BlobStore(documents, KIND)
        self._checkpoint = HeadCheckpoint(self._blobs, clock)
        self._weight_version = weight_version
        self._observer = observer
        self._prunes = prunes
        self._clock = clock
        self._keep = Debounce(KEEP_SECONDS, self._write)
        self._pending = PendingLabels(judging.most_bytes)
        self._points: dict[ScoreKind, DetectionPoints] = {}
        self._head: TrainedHead | None = None
        calibration = judging.calibration
        most_weight = calibration.max_weight if calibration.corrected else None
        self._by_score, self._by_chance = (Evaluation(most_weight, judging.window) for _ in range(2))
        self._said: PruningStatus | None = None
        self._version: int | None = None
        self._groups = 0
        self._refreshed_at = -REFRESH_SECONDS
        self._unreadable = False
        self._begun = False

    def begin(self) -> None:
        """Take what was learned before, and have the head trained. Done once."""
        self._begun = True
        kind, width = self._kind, self._width()
        if not kind.trained or width is not None:
            self._known(kind, width_of(kind, width or 0))
        self._say()

    def close(self) -> None:
        """Keep what was learned, and end what was begun."""
        self._write()
        if self._head is not None:
            self._head.close()
            self._checkpoint.keep()

    # --- the judge ----------------------------------------------------------

    @property
    def detect_at(self) -> tuple[int, ...]:
        return self._judging.detect_at

    @property
    def uses_hidden_states(self) -> bool:
        return self._kind.trained

    @property
    def uses_logprobs(self) -> bool:
        return self._kind is not ScoreKind.HEAD

    def score_state(
        self, group_id: str, index: int, probed: Probed, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Assessment:
        kind = self._judging.kind
        seen = features(kind, probed.state, logprobs)
        known = self._known(kind, seen.size)
        assert self._head is not None
        self._observer.hidden_state_expected(received=True)
        score = self._head.score(seen, probed.tokens)
        scored = PendingScore(reached(known, probed.tokens), probed.tokens, compact(seen))
        return self._judge(group_id, index, scored, score, pruning)

    def score_logprobs(self, group_id: str, index: int, logprobs: tuple[float, ...], pruning: Pruning) -> Assessment:
        kind = ScoreKind.LOGPROB if self._kind.trained else self._kind
        known = self._known(kind, 0)
        value = logprob_score(kind, logprobs)
        score = Score(0.5, HeadStatus.BAD_FEATURE) if value is None else Score(value, HeadStatus.READY)
        scored = PendingScore(reached(known, len(logprobs)), len(logprobs), None)
        return self._judge(group_id, index, scored, score, pruning)

    def record_kept(self, group_id: str, index: int, survival: float) -> None:
        pending = self._pending.find(group_id, index)
        if pending is not None:
            pending.survival *= survival
            if pending.asked:
                self._observer.pruning_decided(kept=True)
            pending.asked = False

    def record_dropped(self, group_id: str, index: int) -> None:
        pending = self._pending.pop(group_id, index)
        if pending is not None and pending.asked:
            self._observer.pruning_decided(kept=False)

    def _judge(self, group_id: str, index: int, scored: PendingScore, score: Score, pruning: Pruning) -> Assessment:
        self._say()
        usable = score.status is not HeadStatus.BAD_FEATURE
        self._observer.trajectory_scored(usable=usable)
        calibrator = scored.point.calibrator
        if score.status is HeadStatus.READY:
            scored.score = score.value
            if calibrator.status is CalibrationStatus.READY:
                scored.chance = calibrator.probability(score.value)
        if usable and (forgotten := self._pending.add(group_id, index, scored)):
            self._observer.pending_labels_dropped(forgotten)
        if scored.chance is None:
            known = calibrator.status is not CalibrationStatus.NO_LABELS or score.status is HeadStatus.READY
            return Assessment(calibrator.prior if known else score.value, 1.0)
        survival = scored.point.survival.of(scored.chance, pruning)
        if (pending := self._pending.find(group_id, index)) is not None:
            pending.asked = survival < 1
        return Assessment(scored.chance, survival)

    # --- what comes of it ---------------------------------------------------

    def learn_reward(self, group_id: str, index: int, reward: float, correct: bool) -> None:
        """A trajectory got its reward."""
        pending = self._pending.pop(group_id, index)
        if pending is None:
            return
        self._refresh()
        target = self._judging.target(reward, correct)
        for scored in pending.scores:
            self._learn(scored, target, pending.survival)
        self._observer.label_learned()
        self._keep.request()

    def record_rewarded_group(self) -> None:
        """All trajectories of a group have rewards.

        A step ends when the weight version changes, as the trainer's does, or after `STEP_GROUPS` groups.
        """
        version, before = self._weight_version(), self._version
        self._version = version
        self._groups += 1
        if before in (None, version) and self._groups < STEP_GROUPS:
            return
        self._groups = 0
        for point in self._all_points():
            point.calibrator.count_step()
            point.changed = True
        self._keep.request()

    def group_ended(self, record: GroupRecord) -> None:
        """See whether all hidden states were told."""
        if not self._prunes(record.policy):
            return
        self._say()
        late = self.detect_at[0] + UNPROBED_TOKENS
        if self.uses_hidden_states:
            for candidate in record.candidates:
                if candidate.quality is None and candidate.tokens > late:
                    self._observer.hidden_state_expected(received=False)

    def _learn(self, scored: PendingScore, target: float, survival: float) -> None:
        if scored.hidden is not None:
            assert self._head is not None
            if scored.score is None:
                now = self._head.score(scored.hidden, scored.tokens)
                scored.score = now.value if now.status is HeadStatus.READY else None
            self._head.learn(scored.hidden, scored.tokens, target, survival)
        if scored.score is not None:
            label = Label(scored.score, target, survival)
            scored.point.calibrator.add(label)
            scored.point.changed = True
            self._by_score.add(label)
        if scored.chance is not None:
            self._by_chance.add(Label(scored.chance, target, survival))

    # --- how it is ----------------------------------------------------------

    @property
    def status(self) -> PruningStatus:
        """Whether any detection point prunes and, if none does, why the first does not."""
        kind = self._kind
        if not self._begun:
            return PruningStatus.UNUSED
        if kind.trained and self._width() is None:
            return PruningStatus.PROBE_LOST
        statuses = [self._status_of(kind, point) for point in self._points.get(kind, {}).values()]
        if not statuses:
            return PruningStatus.UNUSED
        return PruningStatus.READY if PruningStatus.READY in statuses else statuses[0]

    @property
    def report(self) -> TrainerReport:
        """What is known of the head's training."""
        return TrainerReport() if self._head is None else self._head.report

    def score_metrics(self) -> ScoreMetrics:
        """How good scores are, by labels that they were not trained on."""
        return (
            self._by_score.metrics() if not self.uses_hidden_states or self._head is None else self._head.report.metrics
        )

    def calibrated_metrics(self) -> ScoreMetrics:
        """How good the chances are that scores were calibrated to, by labels that came after."""
        return self._by_chance.metrics()

    def _status_of(self, kind: ScoreKind, point: DetectionPoint) -> PruningStatus:
        status = PruningStatus(point.calibrator.status.value)
        if kind.trained and self._head is not None:
            if self._head.status is not HeadStatus.READY:
                return PruningStatus(self._head.status.value)
            if status is PruningStatus.NO_LABELS and self._head.report.learned:  # of before it was trained
                return PruningStatus.FEW_LABELS
        return status

    def _say(self) -> None:
        """Say so when the status has changed."""
        status = self.status
        if status is not self._said:
            neutral = "" if status is PruningStatus.READY else " and all are kept"
            # A warning each time: vLLM leaves nothing below to be read.
            logger.warning("pruning by quality is %s%s: %s", status, neutral, STATUS_REASONS[status])
        self._said = status

    # --- what is learned ----------------------------------------------------

    @property
    def _kind(self) -> ScoreKind:
        judging = self._judging
        if judging.kind.trained and judging.fallback is not None and self._width() is None:
            return judging.fallback
        return judging.kind

    def _known(self, kind: ScoreKind, width: int) -> DetectionPoints:
        self._begun = True
        known = self._points.get(kind)
        if known is None:
            known = points(self._blobs, kind, self.detect_at, self._judging.calibration, width)
            self._points[kind] = known
            if kind.trained:
                self._head = self._new_head(width, self._checkpoint.trained)
            self._refreshed_at = -REFRESH_SECONDS
            self._refresh()
            if self._head is not None:
                self._head.start()
        self._refresh()
        return known

    def _all_points(self) -> Iterator[DetectionPoint]:
        for known in self._points.values():
            yield from known.values()

    def _refresh(self) -> None:
        """Take what a restore has put into the store."""
        now = self._clock()
        if now < self._refreshed_at + REFRESH_SECONDS:
            return
        self._refreshed_at = now
        try:
            for point in self._all_points():
                if (wrong := point.refresh()) is not None:
                    logger.warning("what was learned of %s %s; it is learned anew", point.key, wrong)
            if self._head is not None:
                self._checkpoint.refresh(self._head)
        except StateError as error:
            if not self._unreadable:
                logger.warning("what was learned of quality cannot be read: %s", error)
            self._unreadable = True
        else:
            self._unreadable = False

    def _write(self) -> None:
        try:
            for point in self._all_points():
                point.keep()
        except StateError as error:
            logger.warning("what was learned of quality was not kept: %s", error)
