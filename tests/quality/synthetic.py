"""A synthetic task: hidden states that correlate with the correctness of their trajectory."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from darts_server.quality.head import Head
from darts_server.quality.remote import RemoteHead
from darts_server.quality.types import HeadSettings

# Cores are shared, and these networks are small.
torch.set_num_threads(1)

WIDTH = 16
QUICK = HeadSettings(hidden=16, batch_size=32, capacity=512, half_life=256.0, min_labels=32, learning_rate=1e-2)
Hidden = NDArray[np.float64]


@dataclass
class SyntheticTask:
    """The probability of being correct depends on the hidden state's component along ``direction``, which may drift."""

    seed: int = 0
    sharpness: float = 3.0
    scale: float = 5.0
    offset: float = 100.0
    direction: Hidden = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.direction = self._unit()

    def drift(self, by: float) -> None:
        moved = self.direction + by * self._unit()
        self.direction = moved / np.linalg.norm(moved)

    def trajectories(self, count: int) -> Iterator[tuple[Hidden, float]]:
        """Yield hidden states on a scale far from 0 and 1, and whether their trajectory is correct."""
        for _ in range(count):
            x = self.rng.normal(size=WIDTH)
            is_correct = self.rng.random() < 1 / (1 + np.exp(-self.sharpness * x @ self.direction))
            yield self.offset + self.scale * x, float(is_correct)

    def _unit(self) -> Hidden:
        x = self.rng.normal(size=WIDTH)
        return x / np.linalg.norm(x)


def trained_head(task: SyntheticTask, rounds: int = 8) -> Head:
    """Create a head and train it on ``rounds`` steps of 64 trajectories."""
    head = Head(WIDTH, QUICK)
    for _ in range(rounds):
        train_step(head, task)
    return head


def train_step(head: Head, task: SyntheticTask) -> None:
    """Learn 64 trajectories and train."""
    for hidden, target in task.trajectories(64):
        head.learn(hidden, 512, target)
    head.train(30)


def scorer(head: Head) -> RemoteHead:
    """Return a head that scores by the present report and state of another one."""
    remote = RemoteHead(head.width, head.settings)
    remote._apply(head.report, head.state(), restores_sent=0)
    return remote
