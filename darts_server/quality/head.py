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
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from darts_server.exceptions import InvalidRequest
from darts_server.policy.calibration import MOST_WEIGHT, Label
from darts_server.quality.evaluation import Evaluation, Figures
from darts_server.quality.features import Single, Standardiser, assembled
from darts_server.quality.network import Network, Weights, shapes
from darts_server.quality.replay import Replay
from darts_server.quality.saved import damaged, pack, unpack

EXPLODED = 20.0
"""Nats. Guessing costs 0.7; so much means logits of twenty on the wrong side, on the average."""
NUMBERS = ("width", "hidden", "steps", "seen")


class Status(StrEnum):
    """Whether a score is the head's, and where not, why: then it is the prior."""

    READY = "ready"
    NO_LABELS = "no_labels"
    """No reward was ever reported."""
    FEW_LABELS = "few_labels"
    ONE_CLASS = "one_class"
    """All labels that are remembered are alike."""
    UNTRAINED = "untrained"
    """There are labels enough, and nobody has trained it yet."""
    DIVERGED = "diverged"
    """The last training went wrong and was undone."""
    BAD_FEATURE = "bad_feature"
    """This hidden state has values that are not finite."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """``hidden``: units of the hidden layer. ``batch``: examples a step. ``capacity``: examples remembered.
    ``half_life``: examples after which one is drawn half as often. ``fewest``: examples before it is trained.
    ``corrected``: inverse propensity weights of at most ``most_weight``; the paper's form is without.
    """

    hidden: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch: int = 64
    capacity: int = 4096
    half_life: float = 2048.0
    fewest: int = 64
    corrected: bool = True
    most_weight: float = MOST_WEIGHT
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.hidden, self.batch) < 1:
            raise ValueError(f"hidden and batch must be at least 1, got {self.hidden} and {self.batch}")
        if not 1 <= self.fewest <= self.capacity:
            raise ValueError(f"fewest must be in [1, capacity = {self.capacity}], got {self.fewest}")
        if not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life must be finite and above 0, got {self.half_life}")


@dataclass(frozen=True, slots=True)
class Score:
    """``value``: s' in [0, 1]. ``status``: whether it is the head's."""

    value: float
    status: Status


@dataclass(frozen=True, slots=True)
class Training:
    """``steps`` that were made and kept, and their mean ``loss`` in nats; ``None`` without any."""

    steps: int
    loss: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """A trained head at one moment. Nothing in it is ever changed, so any thread may read it."""

    weights: Weights
    standardiser: Standardiser
    steps: int


class Head:
    """Any thread may call any method. Scores are taken from the last good snapshot and never wait for training.

    Args:
        width: of the model's hidden states.
        settings: see `HeadSettings`.
        clock: seconds; it bounds the time of training.
    """

    def __init__(
        self, width: int, settings: HeadSettings | None = None, clock: Callable[[], float] = time.monotonic
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
        self._evaluation = Evaluation(most_weight)
        self._standardiser = Standardiser.blank(width + 1)
        self._network = Network(
            width + 1, settings.hidden, settings.learning_rate, settings.weight_decay, settings.seed
        )
        self._good = _Snapshot(self._network.weights(), self._standardiser, 0)
        self._diverged = False

    @property
    def status(self) -> Status:
        with self._learning:
            return self._status()

    @property
    def steps(self) -> int:
        """Training steps that made the head what it is."""
        return self._good.steps

    def figures(self) -> Figures:
        """How good its scores were on labels that it had not been trained on."""
        with self._learning:
            return self._evaluation.figures()

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """The chance to end correct of a trajectory with this hidden state after ``position`` tokens.

        Raises:
            ValueError: ``hidden`` has another width, or ``position`` is below 1.
        """
        feature = self._feature(hidden, position)
        with self._learning:
            status = Status.BAD_FEATURE if feature is None else self._status()
            if feature is None or status is not Status.READY:
                return Score(self._replay.prior, status)
            good = self._good
        return Score(_chance(good, feature), status)

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
        label = Label(_chance(good, feature), target, survival) if good.steps else None
        with self._learning:
            if label is not None:
                self._evaluation.add(label)
            self._replay.add(feature, target, survival)
            self._standardiser = self._standardiser.after(feature)
        return True

    def train(self, steps: int, seconds: float = math.inf) -> Training:
        """At most ``steps`` steps, and none begun after ``seconds``; then its scores are the new ones.

        Nothing is done with too few labels, or with labels all alike. Where the loss or a weight stops being finite, or
        the loss explodes, the head goes back to its last good snapshot with a new optimiser, and its scores are the
        prior until a training goes well.
        """
        with self._training:
            with self._learning:
                standardiser = self._standardiser
                if len(self._replay) < self.settings.fewest or self._replay.one_class:
                    return Training(0, None)
            end = self._clock() + seconds
            losses: list[float] = []
            while len(losses) < steps and self._clock() < end:
                losses.append(self._step(standardiser))
                if not losses[-1] < EXPLODED:
                    break
            return self._keep(standardiser, losses)

    def state(self) -> bytes:
        """Weights, optimiser and scale as of the last good training, without the remembered examples."""
        good = self._good
        return pack(
            {**good.weights.arrays, "mean": good.standardiser.mean, "variance": good.standardiser.variance},
            {"width": self.width, "hidden": self.settings.hidden, "steps": good.steps, "seen": good.standardiser.count},
        )

    def restore(self, data: bytes) -> None:
        """Go on from what `state` gave; remembered examples and figures stay. Waits for a training that is under way.

        Raises:
            StateDamaged, StateTooNew: nothing was changed.
            InvalidRequest: it is of a model or a head of another size; nothing was changed.
        """
        restored = self._read(data)
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

    def _status(self) -> Status:
        known = len(self._replay)
        if self._diverged:
            return Status.DIVERGED
        if known >= self.settings.fewest:
            if self._replay.one_class:
                return Status.ONE_CLASS
            return Status.READY if self._good.steps else Status.UNTRAINED
        if self._good.steps:  # restored, and its labels are still to come
            return Status.READY
        return Status.FEW_LABELS if known else Status.NO_LABELS

    def _step(self, standardiser: Standardiser) -> float:
        with self._learning:
            batch = self._replay.sample(self.settings.batch)
        return self._network.fit(standardiser.apply(batch.features), batch)

    def _keep(self, standardiser: Standardiser, losses: list[float]) -> Training:
        if not losses:
            return Training(0, None)
        weights = self._network.weights()
        good = losses[-1] < EXPLODED and weights.finite
        if good:
            snapshot = _Snapshot(weights, standardiser, self._good.steps + len(losses))
        else:
            snapshot = self._good
            self._network.load(snapshot.weights, moments=False)
        with self._learning:
            self._good, self._diverged = snapshot, not good
            self.divergences += not good
        return Training(len(losses), math.fsum(losses) / len(losses)) if good else Training(0, None)

    def _read(self, data: bytes) -> _Snapshot:
        arrays, numbers = unpack(data)
        if set(numbers) != set(NUMBERS):
            raise damaged("lacks a number")
        if (numbers["width"], numbers["hidden"]) != (self.width, self.settings.hidden):
            raise InvalidRequest(
                "state",
                f"is of a quality head with {numbers['width']} inputs and {numbers['hidden']} hidden units, this one "
                f"has {self.width} and {self.settings.hidden}; restore it where the same model is served",
            )
        wanted = shapes(self.width + 1, self.settings.hidden)
        scale = {"mean": (self.width + 1,), "variance": (self.width + 1,)}
        if {name: x.shape for name, x in arrays.items()} != wanted | scale:
            raise damaged("has arrays of other shapes than it says")
        weights = Weights({name: arrays[name].astype(np.float32) for name in wanted})
        mean, variance = (arrays[name].astype(np.float64) for name in scale)
        if not (weights.finite and np.isfinite([mean, variance]).all() and (variance >= 0).all()):
            raise damaged("has values that are not finite, or negative variances")
        return _Snapshot(weights, Standardiser(numbers["seen"], mean, variance), numbers["steps"])


def _chance(snapshot: _Snapshot, feature: Single) -> float:
    return snapshot.weights.chance(snapshot.standardiser.apply(feature))
