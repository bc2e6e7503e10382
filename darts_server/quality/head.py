"""Training of the quality head (ARRoL), which predicts whether a partial trajectory will be correct, from rewards."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from darts_server.estimates.calibration import Label, inverse_propensity_weights
from darts_server.estimates.score_metrics import evaluate
from darts_server.quality.snapshot import MOMENTS, Floats, Single, Snapshot, Standardiser, are_finite, assemble_feature
from darts_server.quality.types import HeadSettings, TrainerReport
from darts_server.types import PruningStatus

MAX_LOSS = 20.0
"""Loss in nats above which training has diverged. Guesses cost 0.7; at 20, logits are wrong by 20 on average."""
SEED = 0
WEIGHT_DECAY = 1e-4
GRADIENT_NORM = 1.0
"""Longer gradients are clipped, so that an unusual batch cannot ruin the weights."""


class Head:
    """A head that learns from labels. Its state is that of the last good training.

    ``width``: size of the model's hidden states. ``clock``: seconds, to limit the time of a training.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.width = width
        self._clock = clock
        # The hidden state, and the position.
        num_inputs = width + 1
        self._replay = ReplayBuffer(num_inputs, settings)
        self._scored: deque[Label] = deque(maxlen=settings.window)
        self._standardiser = Standardiser.blank(num_inputs)
        self._network = Network(num_inputs, settings)
        self._snapshot = Snapshot(self._network.arrays(), self._standardiser, 0)
        self._has_diverged = False
        # Only the totals and the last loss of this report are set. `report` adds the rest.
        self._totals = TrainerReport()

    @property
    def status(self) -> PruningStatus:
        if self._has_diverged:
            return PruningStatus.DIVERGED
        has_enough_labels = len(self._replay) >= self.settings.min_labels
        if has_enough_labels and self._replay.is_one_class:
            return PruningStatus.ONE_CLASS
        # A restored head is trained, but has no labels yet.
        if self.steps > 0:
            return PruningStatus.READY
        if has_enough_labels:
            return PruningStatus.UNTRAINED
        return PruningStatus.FEW_LABELS if len(self._replay) else PruningStatus.NO_LABELS

    @property
    def steps(self) -> int:
        return self._snapshot.steps

    @property
    def report(self) -> TrainerReport:
        return replace(
            self._totals,
            status=self.status,
            prior=self._replay.prior,
            metrics=evaluate(self._scored),
            steps=self.steps,
        )

    def learn(
        self,
        hidden: NDArray[np.floating],
        position: int,
        target: float,
        survival: float = 1.0,
    ) -> None:
        """Add the label of a trajectory that had this hidden state after ``position`` tokens.

        ``target``: 1 for correct, 0 for wrong. ``survival``: probability with which pruning kept the trajectory.
        """
        feature = assemble_feature(hidden, position)
        # Only finite states are scored, so only finite states get labels.
        assert feature is not None
        self._totals = replace(self._totals, labels=self._totals.labels + 1)
        # Metrics are about labels that the head has not learned yet.
        if self.steps:
            self._scored.append(Label(self._snapshot.score(feature), target, survival))
        self._replay.add(feature, target, survival)
        self._standardiser = self._standardiser.with_feature(feature)

    def train(self, steps: int, seconds: float = math.inf) -> int:
        """Make at most ``steps`` steps, start none after ``seconds``, and return the number of steps.

        No step is made with too few labels, or if all labels are equal. After a training that diverged, no step counts,
        and scores are the prior until a training succeeds.
        """
        started_at = self._clock()
        if len(self._replay) < self.settings.min_labels or self._replay.is_one_class:
            return 0
        losses: list[float] = []
        while len(losses) < steps and self._clock() < started_at + seconds:
            features, targets, weights = self._replay.sample(self.settings.batch_size)
            losses.append(self._network.fit(self._standardiser.apply(features), targets, weights))
            # `not <` is also true for NaN.
            if not losses[-1] < MAX_LOSS:
                break
        if not losses:
            return 0

        totals = self._totals
        totals = replace(totals, trained_seconds=totals.trained_seconds + self._clock() - started_at)
        arrays = self._network.arrays()
        self._has_diverged = not (losses[-1] < MAX_LOSS and are_finite(arrays))
        if self._has_diverged:
            # Return to the last good snapshot, with a new optimiser.
            self._totals = replace(totals, divergences=totals.divergences + 1)
            self._network.load(self._snapshot.arrays, moments=False)
            return 0

        self._snapshot = Snapshot(arrays, self._standardiser, self.steps + len(losses))
        loss = math.fsum(losses) / len(losses)
        self._totals = replace(totals, loss=loss, trained_steps=totals.trained_steps + len(losses))
        return len(losses)

    def state(self) -> bytes:
        """Serialize the last good training, without the replay buffer."""
        return self._snapshot.to_bytes()

    def restore(self, data: bytes) -> None:
        """Continue from the bytes of `state`. The replay buffer and metrics stay.

        Raises:
            StateDamaged, InvalidRequest: see `Snapshot.from_bytes`; nothing was changed.
        """
        restored = Snapshot.from_bytes(data, self.width, self.settings.hidden)
        self._network.load(restored.arrays, moments=restored.steps > 0)
        self._standardiser = restored.standardiser
        self._snapshot = restored
        self._has_diverged = False


class ReplayBuffer:
    """The last ``capacity`` examples, which are sampled with replacement, newer examples more often.

    Each takes 4 ``width`` bytes, which are allocated at once.
    """

    def __init__(self, width: int, settings: HeadSettings) -> None:
        self._features = np.zeros((settings.capacity, width), dtype=np.float32)
        self._targets = np.zeros(settings.capacity)
        self._survivals = np.ones(settings.capacity)
        self._added = 0
        self._half_life = settings.half_life
        self._rng = np.random.default_rng(SEED)

    def __len__(self) -> int:
        return min(self._added, self._targets.size)

    @property
    def is_one_class(self) -> bool:
        targets = self._targets[: len(self)]
        return not targets.size or float(np.ptp(targets)) == 0.0

    @property
    def prior(self) -> float:
        """Weighted share of right labels."""
        # One more label of each class, so that the share is never 0 or 1.
        count = len(self)
        weighted_right = float((self._weights() * self._targets[:count]).sum())
        return (weighted_right + 1) / (count + 2)

    def add(self, feature: Single, target: float, survival: float) -> None:
        place = self._added % self._targets.size
        self._features[place] = feature
        self._targets[place] = target
        self._survivals[place] = survival
        self._added += 1

    def sample(self, size: int) -> tuple[Single, Single, Single]:
        """Sample features [size, width], targets [size] and weights [size], which have mean 1 in the whole buffer."""
        count = len(self)
        # Number of examples that were added after each example. The buffer is a ring.
        age = (self._added - 1 - np.arange(count)) % count
        probabilities = np.exp2(-age / self._half_life)
        sampled = self._rng.choice(count, size, p=probabilities / probabilities.sum())
        targets = self._targets[sampled].astype(np.float32)
        weights = self._weights()[sampled].astype(np.float32)
        return self._features[sampled], targets, weights

    def _weights(self) -> Floats:
        return inverse_propensity_weights(self._survivals[: len(self)])


class Network:
    """Linear, ReLU, linear, to one logit; binary cross-entropy and Adam.

    It runs on the CPU, because GPUs are for the engine and a training takes a second.
    """

    def __init__(self, width: int, settings: HeadSettings) -> None:
        # Torch's global generator is left alone: an engine in the same process may rely on its state.
        generator = torch.Generator().manual_seed(SEED)
        hidden = settings.hidden
        self._parameters = {
            "hidden_weight": torch.randn(hidden, width, generator=generator) * (2 / width) ** 0.5,
            "hidden_bias": torch.zeros(hidden),
            # All initial scores are .5.
            "out_weight": torch.zeros(1, hidden),
            "out_bias": torch.zeros(1),
        }
        for parameter in self._parameters.values():
            parameter.requires_grad_()
        self._optimiser = torch.optim.Adam(
            self._parameters.values(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY
        )

    def fit(self, features: Single, targets: Single, weights: Single) -> float:
        """Make one step on standardised features, and return the loss before the step in nats."""
        parameters = self._parameters
        inputs = torch.from_numpy(features)
        hidden = functional.linear(inputs, parameters["hidden_weight"], parameters["hidden_bias"])
        logits = functional.linear(functional.relu(hidden), parameters["out_weight"], parameters["out_bias"]).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(targets), weight=torch.from_numpy(weights)
        )
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), GRADIENT_NORM)
        self._optimiser.step()
        return float(loss.detach())

    def arrays(self) -> dict[str, Single]:
        """Copy weights and moments, by the names of `snapshot.array_shapes`."""
        arrays = {}
        for name, parameter in self._parameters.items():
            arrays[name] = parameter.detach().numpy().copy()
            # Adam has no state before its first step.
            adam = self._optimiser.state.get(parameter, {})
            for moment in MOMENTS:
                initial = torch.zeros(()) if moment == "step" else torch.zeros_like(parameter)
                arrays[f"{name}.{moment}"] = adam.get(moment, initial).numpy().copy()
        return arrays

    def load(self, arrays: Mapping[str, Single], *, moments: bool) -> None:
        """Continue from weights, with their ``moments`` or a new optimiser."""
        self._optimiser.state.clear()
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(arrays[name]))
            if moments:
                copies = {moment: torch.from_numpy(arrays[f"{name}.{moment}"].copy()) for moment in MOMENTS}
                self._optimiser.state[parameter] = copies
