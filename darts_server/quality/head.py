"""The quality head (ARRoL): predicts whether a partial trajectory will be correct, trained on-line from rewards.

Usage::

    head = Head(width=4096)
    head.score(hidden, position=512).value             # 0.5: nothing is learned yet
    head.learn(hidden, position=512, target=1.0, survival=0.7)
    head.train(steps=50, seconds=1.0)                  # in any thread
"""

import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import Label
from darts_server.quality.evaluation import Evaluation, ScoreMetrics
from darts_server.quality.features import Single, Standardiser, assemble_feature
from darts_server.quality.network import Network
from darts_server.quality.replay import ReplayBuffer
from darts_server.quality.snapshot import Snapshot
from darts_server.quality.types import HeadSettings, HeadStatus, Score, TrainingResult

MAX_LOSS = 20.0
"""Nats; a higher loss is a divergence. Guessing costs 0.7, and 20 means logits that are wrong by 20 on average."""


class Head:
    """Any thread may call any method. Scores come from the last good snapshot and never wait for training.

    Args:
        width: of the model's hidden states.
        settings: see `HeadSettings`.
        clock: seconds; bounds the duration of a training.
        device: torch's name of the device to train on.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        device: str = "cpu",
    ) -> None:
        self.settings = settings = settings or HeadSettings()
        self.width = width
        self.divergences = 0
        self._clock = clock
        # Guards replay, standardiser, evaluation and counters, and is never held during a training step.
        self._data_lock = threading.Lock()
        self._network_lock = threading.Lock()
        max_weight = settings.max_weight if settings.corrected else None
        self._replay = ReplayBuffer(
            width + 1,
            capacity=settings.capacity,
            half_life=settings.half_life,
            max_weight=max_weight,
            rng=np.random.default_rng(settings.seed),
        )
        self._evaluation = Evaluation(max_weight, settings.window)
        self._standardiser = Standardiser.blank(width + 1)
        self._network = Network(
            width + 1, settings.hidden, settings.learning_rate, settings.weight_decay, settings.seed, device
        )
        self._snapshot = Snapshot(self._network.weights(), self._standardiser, 0)
        self._has_diverged = False

    @property
    def status(self) -> HeadStatus:
        with self._data_lock:
            return self._status()

    @property
    def prior(self) -> float:
        """Share of correct ones among the labels in the buffer: the score while the status is not ``READY``."""
        with self._data_lock:
            return self._replay.prior

    @property
    def steps(self) -> int:
        """Training steps behind the current weights."""
        return self._snapshot.steps

    def metrics(self) -> ScoreMetrics:
        """How good its scores were on labels that it had not been trained on."""
        with self._data_lock:
            return self._evaluation.metrics()

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """Predict the probability that a trajectory with this hidden state after ``position`` tokens is correct.

        Raises:
            ValueError: ``hidden`` has another width, or ``position`` is below 1.
        """
        feature = self._feature(hidden, position)
        with self._data_lock:
            status = HeadStatus.BAD_FEATURE if feature is None else self._status()
            if feature is None or status is not HeadStatus.READY:
                return Score(self._replay.prior, status)
            snapshot = self._snapshot
        return Score(snapshot.score(feature), status)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool:
        """Add a labelled trajectory; ``False`` if its feature is not finite: then it is only counted.

        ``target``: 1 correct, 0 wrong, or in between. ``survival``: the probability with which pruning kept it.

        Raises:
            ValueError: as `score`, or ``target`` or ``survival`` is out of range.
        """
        Label(0.0, target, survival)  # raises if they are out of range
        feature = self._feature(hidden, position)
        if feature is None:
            return False
        snapshot = self._snapshot
        # The label evaluates the head from before it is learned, so it must be scored first.
        label = Label(snapshot.score(feature), target, survival) if snapshot.steps else None
        with self._data_lock:
            if label is not None:
                self._evaluation.add(label)
            self._replay.add(feature, target, survival)
            self._standardiser = self._standardiser.after(feature)
        return True

    def train(self, steps: int, seconds: float = math.inf) -> TrainingResult:
        """Make at most ``steps`` steps, start none after ``seconds``, and use the new weights for scores.

        With too few labels, or with labels that are all equal, it does nothing. If the training diverges (the loss or a
        weight is not finite, or the loss exceeds `MAX_LOSS`), the head returns to its last good snapshot with a new
        optimiser, and scores are the prior until a training succeeds.
        """
        with self._network_lock:
            with self._data_lock:
                standardiser = self._standardiser
                if len(self._replay) < self.settings.min_labels or self._replay.is_one_class:
                    return TrainingResult(0, None)
            end = self._clock() + seconds
            losses: list[float] = []
            while len(losses) < steps and self._clock() < end:
                losses.append(self._step(standardiser))
                if not losses[-1] < MAX_LOSS:  # also true of NaN
                    break
            return self._finish_training(standardiser, losses)

    def state(self) -> bytes:
        """Serialize weights, optimiser and scale of the last good training, without the replay buffer."""
        return self._snapshot.to_bytes(self.width, self.settings.hidden)

    def restore(self, data: bytes) -> None:
        """Continue from what `state` returned; the replay buffer and metrics stay. Waits for a training in progress.

        Raises:
            StateDamaged, StateTooNew: nothing was changed.
            InvalidRequest: it is of a model or a head of another size; nothing was changed.
        """
        restored = Snapshot.from_bytes(data, self.width, self.settings.hidden)
        with self._network_lock, self._data_lock:
            self._network.load(restored.weights, moments=restored.steps > 0)
            self._standardiser = restored.standardiser
            self._snapshot, self._has_diverged = restored, False

    # --- helpers, some of which need a lock to be held ------------------------

    def _feature(self, hidden: NDArray[np.floating], position: int) -> Single | None:
        if hidden.shape != (self.width,):
            raise ValueError(f"hidden must have shape ({self.width},), got {hidden.shape}")
        return assemble_feature(hidden, position)

    def _status(self) -> HeadStatus:
        labels, has_trained = len(self._replay), self._snapshot.steps > 0
        if self._has_diverged:
            return HeadStatus.DIVERGED
        if labels >= self.settings.min_labels:
            if self._replay.is_one_class:
                return HeadStatus.ONE_CLASS
            return HeadStatus.READY if has_trained else HeadStatus.UNTRAINED
        if has_trained:  # it was restored, and its labels are still to come
            return HeadStatus.READY
        return HeadStatus.FEW_LABELS if labels else HeadStatus.NO_LABELS

    def _step(self, standardiser: Standardiser) -> float:
        with self._data_lock:
            batch = self._replay.sample(self.settings.batch_size)
        return self._network.fit(standardiser.apply(batch.features), batch)

    def _finish_training(self, standardiser: Standardiser, losses: list[float]) -> TrainingResult:
        """Score by the new weights from now on, or return to the last good ones."""
        if not losses:
            return TrainingResult(0, None)
        weights = self._network.weights()
        is_good = losses[-1] < MAX_LOSS and weights.are_finite
        if is_good:
            snapshot = Snapshot(weights, standardiser, self._snapshot.steps + len(losses))
        else:
            snapshot = self._snapshot
            self._network.load(snapshot.weights, moments=False)
        with self._data_lock:
            self._snapshot, self._has_diverged = snapshot, not is_good
            self.divergences += not is_good
        return TrainingResult(len(losses), math.fsum(losses) / len(losses)) if is_good else TrainingResult(0, None)
