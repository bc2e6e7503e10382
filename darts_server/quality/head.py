"""The quality head (ARRoL): predicts whether a partial trajectory will be correct, trained on-line from rewards.

`remote.RemoteHead` runs it in a process of its own, and scores by its report and state.
"""

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
"""Nats; a higher loss is a divergence. Guessing costs 0.7, and 20 means logits that are wrong by 20 on average."""
GRADIENT_NORM = 1.0
"""Longer gradients are clipped, so that one unusual batch cannot ruin the weights."""


class Head:
    """Its state is that of the last good training.

    Args:
        width: of the model's hidden states.
        clock: seconds; bounds the duration of a training.
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
        self._replay = ReplayBuffer(width + 1, settings)
        self._scored: deque[Label] = deque(maxlen=settings.window)
        self._standardiser = Standardiser.blank(width + 1)
        self._network = Network(width + 1, settings)
        self._snapshot = Snapshot(self._network.arrays(), self._standardiser, 0)
        self._has_diverged = False
        self._report = TrainerReport()  # the counts and the loss alone

    @property
    def status(self) -> PruningStatus:
        labels, has_trained = len(self._replay), self._snapshot.steps > 0
        if self._has_diverged:
            return PruningStatus.DIVERGED
        if labels >= self.settings.min_labels:
            if self._replay.is_one_class:
                return PruningStatus.ONE_CLASS
            return PruningStatus.READY if has_trained else PruningStatus.UNTRAINED
        if has_trained:  # it was restored, and its labels are still to come
            return PruningStatus.READY
        return PruningStatus.FEW_LABELS if labels else PruningStatus.NO_LABELS

    @property
    def steps(self) -> int:
        """Training steps behind the current weights."""
        return self._snapshot.steps

    @property
    def report(self) -> TrainerReport:
        metrics = evaluate(self._scored, self.settings.max_weight)
        return replace(self._report, status=self.status, prior=self._replay.prior, metrics=metrics, steps=self.steps)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> None:
        """Add the label of a trajectory with this hidden state after ``position`` tokens, which must be finite.

        ``target``: 1 correct, 0 wrong. ``survival``: the probability with which pruning kept it.
        """
        feature = assemble_feature(hidden, position)
        assert feature is not None
        self._report = replace(self._report, labels=self._report.labels + 1)
        if self.steps:  # the label evaluates the head from before it is learned
            self._scored.append(Label(self._snapshot.score(feature), target, survival))
        self._replay.add(feature, target, survival)
        self._standardiser = self._standardiser.after(feature)

    def train(self, steps: int, seconds: float = math.inf) -> int:
        """Make at most ``steps`` steps, start none after ``seconds``, and score by the new weights; return the steps.

        With too few labels, or with labels that are all equal, it does nothing. If the training diverges (the loss or a
        weight is not finite, or the loss exceeds `MAX_LOSS`), the head returns to its last good snapshot with a new
        optimiser, and scores are the prior until a training succeeds; no step counts then.
        """
        started = self._clock()
        if len(self._replay) < self.settings.min_labels or self._replay.is_one_class:
            return 0
        losses: list[float] = []
        while len(losses) < steps and self._clock() < started + seconds:
            features, targets, weights = self._replay.sample(self.settings.batch_size)
            losses.append(self._network.fit(self._standardiser.apply(features), targets, weights))
            if not losses[-1] < MAX_LOSS:  # also true of NaN
                break
        if not losses:
            return 0
        report = self._report
        report = replace(report, trained_seconds=report.trained_seconds + self._clock() - started)
        arrays = self._network.arrays()
        self._has_diverged = not (losses[-1] < MAX_LOSS and are_finite(arrays))
        if self._has_diverged:
            self._report = replace(report, divergences=report.divergences + 1)
            self._network.load(self._snapshot.arrays, moments=False)
            return 0
        self._snapshot = Snapshot(arrays, self._standardiser, self.steps + len(losses))
        loss, trained_steps = math.fsum(losses) / len(losses), report.trained_steps + len(losses)
        self._report = replace(report, loss=loss, trained_steps=trained_steps)
        return len(losses)

    def state(self) -> bytes:
        """Serialize weights, optimiser and scale of the last good training, without the replay buffer."""
        return self._snapshot.to_bytes()

    def restore(self, data: bytes) -> None:
        """Continue from what `state` returned; the replay buffer and metrics stay.

        Raises:
            StateDamaged: nothing was changed.
            InvalidRequest: it is of a model or a head of another size; nothing was changed.
        """
        restored = Snapshot.from_bytes(data, self.width, self.settings.hidden)
        self._network.load(restored.arrays, moments=restored.steps > 0)
        self._standardiser = restored.standardiser
        self._snapshot, self._has_diverged = restored, False


class ReplayBuffer:
    """The last ``capacity`` examples; each takes 4 ``width`` bytes, allocated at once.

    Batches are sampled with replacement, newer examples more often.
    """

    def __init__(self, width: int, settings: HeadSettings) -> None:
        self._features = np.zeros((settings.capacity, width), dtype=np.float32)
        self._targets = np.zeros(settings.capacity)
        self._survivals = np.ones(settings.capacity)
        self._added = 0
        self._half_life = settings.half_life
        self._max_weight = settings.max_weight
        self._rng = np.random.default_rng(settings.seed)

    def __len__(self) -> int:
        return min(self._added, self._targets.size)

    @property
    def is_one_class(self) -> bool:
        """Whether all targets are equal, so that there is nothing to learn from them."""
        targets = self._targets[: len(self)]
        return not targets.size or float(np.ptp(targets)) == 0.0

    @property
    def prior(self) -> float:
        """Weighted share of positives, with one pseudo-label of each class, so that it is never 0 or 1."""
        count = len(self)
        return float((self._weights() * self._targets[:count]).sum() + 1) / (count + 2)

    def add(self, feature: Single, target: float, survival: float) -> None:
        place = self._added % self._targets.size
        self._features[place], self._targets[place], self._survivals[place] = feature, target, survival
        self._added += 1

    def sample(self, size: int) -> tuple[Single, Single, Single]:
        """Copy a batch out of the buffer, which must not be empty: features [size, width], targets and weights [size].

        The weights of the whole buffer have mean 1.
        """
        count = len(self)
        age = (self._added - 1 - np.arange(count)) % count
        probabilities = np.exp2(-age / self._half_life)
        sampled = self._rng.choice(count, size, p=probabilities / probabilities.sum())
        targets, weights = self._targets[sampled], self._weights()[sampled]
        return self._features[sampled], targets.astype(np.float32), weights.astype(np.float32)

    def _weights(self) -> Floats:
        return inverse_propensity_weights(self._survivals[: len(self)], self._max_weight)


class Network:
    """Linear, ReLU, linear, to one logit; binary cross-entropy and Adam.

    The initial weights come from the seed alone. Torch's global generator is not used, because an engine in the same
    process may rely on its state. It computes on the CPU: GPUs are for the engine, and a training takes a second.
    """

    def __init__(self, width: int, settings: HeadSettings) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        hidden = settings.hidden
        initial = {
            "hidden_weight": torch.randn(hidden, width, generator=generator) * (2 / width) ** 0.5,
            "hidden_bias": torch.zeros(hidden),
            "out_weight": torch.zeros(1, hidden),  # so that all initial scores are a half
            "out_bias": torch.zeros(1),
        }
        self._parameters = {name: x.requires_grad_() for name, x in initial.items()}
        self._optimiser = torch.optim.Adam(
            self._parameters.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def fit(self, features: Single, targets: Single, weights: Single) -> float:
        """Make one step on standardised features; return the loss before the step, in nats."""
        p = self._parameters
        x, y, w = (torch.from_numpy(a) for a in (features, targets, weights))
        hidden = functional.relu(functional.linear(x, p["hidden_weight"], p["hidden_bias"]))
        logits = functional.linear(hidden, p["out_weight"], p["out_bias"]).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, y, weight=w)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), GRADIENT_NORM)
        self._optimiser.step()
        return float(loss.detach())

    def arrays(self) -> dict[str, Single]:
        """Copy everything learned, by the names of `snapshot.shapes`."""
        arrays = {name: p.detach().numpy().copy() for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            adam = self._optimiser.state.get(p, {})
            for m in MOMENTS:
                initial = torch.zeros(()) if m == "step" else torch.zeros_like(p)
                arrays[f"{name}.{m}"] = adam.get(m, initial).numpy().copy()
        return arrays

    def load(self, arrays: Mapping[str, Single], *, moments: bool) -> None:
        """Continue from these arrays; the optimiser starts again unless ``moments`` are to be loaded as well."""
        self._optimiser.state.clear()
        for name, p in self._parameters.items():
            with torch.no_grad():
                p.copy_(torch.from_numpy(arrays[name]))
            if moments:
                self._optimiser.state[p] = {m: torch.from_numpy(arrays[f"{name}.{m}"].copy()) for m in MOMENTS}
