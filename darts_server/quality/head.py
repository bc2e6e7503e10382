"""The quality head (ARRoL): how likely a partial trajectory is to end correct, learned on-line from rewards.

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
from darts_server.quality.features import Single, Standardiser, assembled
from darts_server.quality.network import Network
from darts_server.quality.replay import Replay
from darts_server.quality.snapshot import Snapshot
from darts_server.quality.types import HeadSettings, HeadStatus, Score, TrainingResult

EXPLODED = 20.0
"""Nats. Guessing costs 0.7; so much means logits of twenty on the wrong side, on the average."""


class Head:
    """Any thread may call any method. Scores are taken from the last good snapshot and never wait for training.

    Args:
        width: of the model's hidden states.
        settings: see `HeadSettings`.
        clock: seconds; it bounds the time of training.
        device: where it is trained, in torch's words.
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
        self.rejected = 0
        """Features that were not finite."""
        self.divergences = 0
        self._clock = clock
        self._learning = threading.Lock()  # replay, standardiser, evaluation, counters: never held for a training step
        self._training = threading.Lock()  # the network
        most_weight = settings.most_weight if settings.corrected else None
        self._replay = Replay(
            width + 1,
            capacity=settings.capacity,
            half_life=settings.half_life,
            most_weight=most_weight,
            rng=np.random.default_rng(settings.seed),
        )
        self._evaluation = Evaluation(most_weight, settings.window)
        self._standardiser = Standardiser.blank(width + 1)
        self._network = Network(
            width + 1, settings.hidden, settings.learning_rate, settings.weight_decay, settings.seed, device
        )
        self._good = Snapshot(self._network.weights(), self._standardiser, 0)
        self._diverged = False

    @property
    def status(self) -> HeadStatus:
        with self._learning:
            return self._status()

    @property
    def prior(self) -> float:
        """Share of right ones among the remembered labels; every score is it while the status is not ``READY``."""
        with self._learning:
            return self._replay.prior

    @property
    def steps(self) -> int:
        """TrainingResult steps that made the head what it is."""
        return self._good.steps

    def metrics(self) -> ScoreMetrics:
        """How good its scores were on labels that it had not been trained on."""
        with self._learning:
            return self._evaluation.metrics()

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """The chance to end correct of a trajectory with this hidden state after ``position`` tokens.

        Raises:
            ValueError: ``hidden`` has another width, or ``position`` is below 1.
        """
        feature = self._feature(hidden, position)
        with self._learning:
            status = HeadStatus.BAD_FEATURE if feature is None else self._status()
            if feature is None or status is not HeadStatus.READY:
                return Score(self._replay.prior, status)
            good = self._good
        return Score(good.chance(feature), status)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool:
        """Remember a labelled trajectory; ``False`` if its feature is not finite, and then it is only counted.

        ``target``: 1 right, 0 wrong, or in between. ``survival``: the probability with which pruning kept it.

        Raises:
            ValueError: as `score`, or ``target`` or ``survival`` is out of range.
        """
        Label(0.0, target, survival)
        feature = self._feature(hidden, position)
        if feature is None:
            return False
        good = self._good
        # What is about to be learned judges what was learned before.
        label = Label(good.chance(feature), target, survival) if good.steps else None
        with self._learning:
            if label is not None:
                self._evaluation.add(label)
            self._replay.add(feature, target, survival)
            self._standardiser = self._standardiser.after(feature)
        return True

    def train(self, steps: int, seconds: float = math.inf) -> TrainingResult:
        """At most ``steps`` steps, and none begun after ``seconds``; then its scores are the new ones.

        Nothing is done with too few labels, or with labels all alike. Where the loss or a weight stops being finite, or
        the loss explodes, the head goes back to its last good snapshot with a new optimiser, and its scores are the
        prior until a training goes well.
        """
        with self._training:
            with self._learning:
                standardiser = self._standardiser
                if len(self._replay) < self.settings.fewest or self._replay.one_class:
                    return TrainingResult(0, None)
            end = self._clock() + seconds
            losses: list[float] = []
            while len(losses) < steps and self._clock() < end:
                losses.append(self._step(standardiser))
                if not losses[-1] < EXPLODED:
                    break
            return self._keep(standardiser, losses)

    def state(self) -> bytes:
        """Weights, optimiser and scale as of the last good training, without the remembered examples."""
        return self._good.packed(self.width, self.settings.hidden)

    def restore(self, data: bytes) -> None:
        """Go on from what `state` gave; remembered examples and figures stay. Waits for a training that is under way.

        Raises:
            StateDamaged, StateTooNew: nothing was changed.
            InvalidRequest: it is of a model or a head of another size; nothing was changed.
        """
        restored = Snapshot.read(data, self.width, self.settings.hidden)
        with self._training, self._learning:
            self._network.load(restored.weights, moments=restored.steps > 0)
            self._standardiser = restored.standardiser
            self._good, self._diverged = restored, False

    # --- the parts ----------------------------------------------------------

    def _feature(self, hidden: NDArray[np.floating], position: int) -> Single | None:
        if hidden.shape != (self.width,):
            raise ValueError(f"hidden must have shape ({self.width},), got {hidden.shape}")
        feature = assembled(hidden, position)
        if feature is None:
            with self._learning:
                self.rejected += 1
        return feature

    def _status(self) -> HeadStatus:
        known = len(self._replay)
        if self._diverged:
            return HeadStatus.DIVERGED
        if known >= self.settings.fewest:
            if self._replay.one_class:
                return HeadStatus.ONE_CLASS
            return HeadStatus.READY if self._good.steps else HeadStatus.UNTRAINED
        if self._good.steps:  # restored, and its labels are still to come
            return HeadStatus.READY
        return HeadStatus.FEW_LABELS if known else HeadStatus.NO_LABELS

    def _step(self, standardiser: Standardiser) -> float:
        with self._learning:
            batch = self._replay.sample(self.settings.batch)
        return self._network.fit(standardiser.apply(batch.features), batch)

    def _keep(self, standardiser: Standardiser, losses: list[float]) -> TrainingResult:
        if not losses:
            return TrainingResult(0, None)
        weights = self._network.weights()
        good = losses[-1] < EXPLODED and weights.finite
        if good:
            snapshot = Snapshot(weights, standardiser, self._good.steps + len(losses))
        else:
            snapshot = self._good
            self._network.load(snapshot.weights, moments=False)
        with self._learning:
            self._good, self._diverged = snapshot, not good
            self.divergences += not good
        return TrainingResult(len(losses), math.fsum(losses) / len(losses)) if good else TrainingResult(0, None)
