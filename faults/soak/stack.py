"""Everything above the engine, wired as the server wires it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from darts_server.control import Control
from darts_server.metrics import QualityMetrics, RolloutMetrics
from darts_server.policy.allocation.brownout import Brownout
from darts_server.policy.pruning.calibration import BUFFER, Calibration
from darts_server.quality.evaluation import WINDOW
from darts_server.records import GroupRecord
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention
from darts_server.rollout.exchange.log import MAX_KEPT, ObservationLog
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.length_bias import LengthBias
from darts_server.rollout.observers.monitor import Monitor
from darts_server.rollout.observers.provenance import DEFAULT_KEPT, Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.pruning.score_kinds import ScoringSettings
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.voting.confidence import Confidence
from darts_server.rollout.voting.runner import VoteRunner
from darts_server.serving.admission import Admission, Bounds
from darts_server.serving.gate import Gate
from darts_server.settings import Settings
from darts_server.store import Store
from darts_server.store.backend import MAX_IN_MEMORY
from faults.soak.engine import QUICK, WIDTH, Engine, LocalFinder, LocalHead, Texts, VirtualLoop, random_scripts

MODEL = "scripted"
CAPACITY, MAX_WAITING = 256, 1024


@dataclass(frozen=True)
class Retention:
    """How much the server retains. Growth can be measured only once all of this is full.

    Attributes:
        groups: finished ones.
        votes: finished ones.
        documents: of each kind, without a state folder.
        flight_bytes: hidden states that wait for rewards; the server's 256 MiB take long to fill.
        labels: for each kind of score.
        vote_labels: for each kind of vote score.
        window: labels that the quality figures are computed over.
        batches: finished durable ones.
        observations: for other servers.
    """

    groups: int = DEFAULT_KEPT
    votes: int = DEFAULT_KEPT
    documents: int = MAX_IN_MEMORY
    flight_bytes: int = 4 * 1024 * 1024
    labels: int = BUFFER
    vote_labels: int = BUFFER
    window: int = WINDOW
    batches: int = 64
    observations: int = MAX_KEPT


class Stack:
    """The whole server but its engine and its routes, on one loop."""

    def __init__(self, loop: VirtualLoop, retention: Retention, state_dir: Path | None = None, seed: int = 0) -> None:
        self.engine = Engine(random_scripts(seed))
        self.engine.capacity, self.engine.probe_width = CAPACITY, WIDTH
        self.store = store = Store(state_dir, max_in_memory=retention.documents)
        self.registry = CollectorRegistry()
        self.metrics = RolloutMetrics(MODEL, registry=self.registry)
        self.gate = Gate()
        self.control = control = Control(Settings.model_validate({}))
        confidence = Confidence(store, retention.votes, _calibration(retention.vote_labels, cold_steps=0))
        self.pruner = Pruner(
            ScoringSettings(
                (4, 8),
                calibration=_calibration(retention.labels, cold_steps=1),
                max_bytes=retention.flight_bytes,
                window=retention.window,
            ),
            lambda: WIDTH,
            partial(LocalHead, settings=replace(QUICK, window=retention.window)),
            store,
            lambda: self.engine.weight_version,
            QualityMetrics(MODEL, registry=self.registry),
            control.prunes,
            loop.time,
        )
        admission = Admission(lambda: self.engine.unfinished, CAPACITY, Bounds(MAX_WAITING))
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            control.planner,
            Statistics(store, CAPACITY),
            Intervals(join=0.5, join_named=6.0),
            gate=self.gate,
            admission=admission,
            brownout=Brownout.for_queue(MAX_WAITING, CAPACITY, 0.5),
            scorer=self.pruner,
            clock=loop.time,
        )
        control.apply_to(self.rollouts)
        self.rollouts.exchange.log = ObservationLog(retention.observations)
        self.monitor = Monitor(self.rollouts, loop.time)
        self.reward_matcher = RewardMatcher(
            self.rollouts.exchange,
            self._rewarded,
            self.metrics,
            retention.groups,
            [confidence.learn_reward, self.pruner.learn_reward],
        )
        self.rollouts.observe(
            self.metrics, Provenance(retention.groups), LengthBias(), self.reward_matcher, self.monitor, self.pruner
        )
        batch_retention = BatchRetention(kept_batches=retention.batches)
        self.batches = BatchRegistry(self.rollouts, Texts(), control.new_planner, batch_retention, clock=loop.time)
        self.votes = VoteRunner(self.rollouts, Texts(), confidence, LocalFinder(), self.metrics, loop.time)

    def count(self, name: str) -> float:
        """Sum of a counter over its labels."""
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name == name)

    def count_by(self, name: str, label: str) -> dict[str, float]:
        """Return a counter's values by one of its labels."""
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}

    def close(self) -> None:
        self.pruner.close()
        self.rollouts.statistics.flush()
        self.store.close()

    def _rewarded(self, record: GroupRecord, right: Mapping[int, bool]) -> None:
        self.rollouts.group_rewarded(record, right)
        self.pruner.record_rewarded_group()


def _calibration(labels: int, cold_steps: int) -> Calibration:
    return Calibration(buffer=labels, cold_steps=cold_steps, cold_labels=min(64, labels))
