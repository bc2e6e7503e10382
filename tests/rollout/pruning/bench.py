"""A pruner whose head is trained in this process, and a trainer that rewards its trajectories."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from darts_server.engine.port import HiddenState
from darts_server.estimates.calibration import Calibration
from darts_server.group.events import Scored
from darts_server.observers import PruningObserver
from darts_server.policy.survival import Pruning
from darts_server.quality.head import Head
from darts_server.quality.remote import RemoteHead
from darts_server.rollout.learned.documents import DocumentStore as Store
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.scoring import ScoringSettings
from darts_server.types import PruningStatus
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask
from tests.rollout.helpers import Documents

TRAIN_INTERVAL = 64
"""Labels."""
FAST = ScoringSettings(detect_at=(10,), calibration=Calibration(cold_steps=1, cold_labels=64, bins=16))


class LocalHead(RemoteHead):
    """Trains in this process, in `learn`, after each 64 labels. Until it is ready it reports after each label."""

    def __init__(self, width: int, on_state: Callable[[bytes], None]) -> None:
        super().__init__(width, QUICK, on_report=lambda _, state: on_state(state))
        self.trainer = Head(width, QUICK)
        self.started = self.closed = False
        self._learned = 0

    def start(self) -> None:
        self.started = True

    def close(self) -> None:
        self.closed = True

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> None:
        self.trainer.learn(hidden, position, target, survival)
        self._learned += 1
        is_trained = self._learned % TRAIN_INTERVAL == 0 and self.trainer.train(20) > 0
        if is_trained or self.report.status is not PruningStatus.READY:
            self._apply(self.trainer.report, self.trainer.state() if is_trained else b"", self._num_restores)

    def restore(self, data: bytes) -> None:
        super().restore(data)
        self.trainer.restore(data or Head(self.width, self.settings).state())


class EventCounter(PruningObserver):
    """Counts the events of the pruner."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def trajectory_scored(self, *, usable: bool) -> None:
        self.counts["usable" if usable else "unusable"] += 1

    def pruning_decided(self, *, kept: bool) -> None:
        self.counts["kept" if kept else "pruned"] += 1

    def hidden_state_expected(self, *, received: bool) -> None:
        self.counts["states received" if received else "states missing"] += 1

    def label_learned(self) -> None:
        self.counts["labels"] += 1

    def pending_labels_dropped(self, count: int) -> None:
        self.counts["dropped"] += count


@dataclass
class Bench:
    """A pruner, and a trainer whose trajectories are those of a synthetic task."""

    scoring: ScoringSettings = FAST
    store: Store = field(default_factory=Documents)
    task: SyntheticTask = field(default_factory=SyntheticTask)
    width: int | None = WIDTH
    version: int = 0
    now: float = 0.0
    pruning: Pruning = field(default_factory=Pruning)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def __post_init__(self) -> None:
        self.heads: list[LocalHead] = []
        self.counter = EventCounter()
        self.groups = 0
        self.pruner = Pruner(
            self.scoring,
            lambda: self.width,
            self._create_head,
            self.store,
            lambda: self.version,
            self.counter,
            lambda: self.now,
        )

    @property
    def head(self) -> LocalHead:
        return self.heads[-1]

    def _create_head(self, width: int, on_state: Callable[[bytes], None]) -> LocalHead:
        self.heads.append(LocalHead(width, on_state))
        return self.heads[-1]

    def score(self, group_id: str, index: int, hidden: NDArray[np.floating], tokens: int = 10) -> Scored:
        return self.pruner.score(
            (None, group_id), index, HiddenState(tokens, hidden.astype(np.float32)), (), self.pruning
        )

    def group(self, size: int = 8) -> tuple[list[Scored], int]:
        """Score a group and reward its survivors; return its scores and the number of survivors."""
        self.groups += 1
        self.now += 1
        name, scores, kept = f"g{self.groups}", [], []
        for index, (hidden, target) in enumerate(self.task.trajectories(size)):
            scored = self.score(name, index, hidden)
            scores.append(scored)
            if self.rng.random() < scored.survival:
                self.pruner.record_kept((None, name), index, scored.survival)
                kept.append((index, target))
            else:
                self.pruner.record_dropped((None, name), index)
        for index, target in kept:
            self.pruner.learn_reward((None, name), index, target > 0)
        self.pruner.record_rewarded_group()
        return scores, len(kept)

    def step(self, groups: int = 16) -> list[tuple[list[Scored], int]]:
        """Run groups, then change the weights."""
        results = [self.group() for _ in range(groups)]
        self.version += 1
        return results

    def warm(self, steps: int = 4) -> "Bench":
        for _ in range(steps):
            self.step()
        return self
