"""Servers that learn, without an engine, and groups that they learn from."""

import json
from typing import Any

import numpy as np

from darts_server.http.resources.observations_models import Encoder, ObservationsIn
from darts_server.policy.deadline import Deadline
from darts_server.policy.reward_stats import RewardStats, single_length
from darts_server.records import CandidateRecord, ChosenOption, GroupRecord
from darts_server.rollout.allocation.allocator import Allocator
from darts_server.rollout.exchange.exchange import Exchange
from darts_server.rollout.exchange.observations import OriginalObservation
from darts_server.rollout.learned.statistics import Statistics
from darts_server.types import FinishReason, MaxLost, Outcome, SelectedAs
from tests.rollout.helpers import Documents

POLICY = "darts_cut"


class Learner:
    """What one server learns."""

    def __init__(self, documents: Documents | None = None) -> None:
        self.documents = documents or Documents()
        self.statistics = Statistics(self.documents)
        self.allocator = Allocator(self.statistics, 0.0, lambda record: None, lambda: 0.0, np.random.default_rng(0))
        self.exchange = Exchange(self.statistics, self.allocator)

    def end(self, record: GroupRecord) -> None:
        """End a group here."""
        for observer in (self.statistics, self.allocator, self.exchange):
            observer.group_ended(record)

    def reward(self, record: GroupRecord, correct: dict[int, bool]) -> None:
        """Learn the rewards of all trajectories of a group."""
        stats = RewardStats(groups=1, zero_variance=int(len(set(correct.values())) == 1))
        for c in record.selected:
            length = single_length(c.tokens, c.weight or 1.0)
            stats += RewardStats(right=length) if correct[c.index] else RewardStats(wrong=length)
        self.exchange.learn({record.prompt_key: stats})
        self.exchange.group_rewarded(record, correct)

    def explore(self) -> None:
        """Decide whether a cohort explores."""
        self.allocator.deadlines.should_explore(Deadline(), POLICY, 16)

    def sent(self, life: str = "", number: int = 0, most: int = 10_000) -> list[dict[str, Any]]:
        """What it tells others, as JSON."""
        log = self.exchange.log
        found = [Encoder(log.life).encode(*each) for each in self.exchange.after(life, number, most)]
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]

    async def learn_from(self, sent: list[dict[str, Any]]) -> tuple[int, int, int]:
        """Learn what another one has sent; how many were learned, repeated and missed."""
        result = await self.exchange.learn_from_others(read(sent))
        return result.learned, result.repeated, result.missed

    @property
    def learned(self) -> dict[tuple[str, str], Any]:
        """Everything that it has learned."""
        self.statistics.flush()
        return {name: document for name, document in self.documents.kept.items() if name[0] != "observed"}


def read(sent: list[dict[str, Any]]) -> list[OriginalObservation]:
    return ObservationsIn.model_validate_json(json.dumps({"observations": sent})).to_observations()


def random_group(rng: np.random.Generator, key: str | None = None) -> GroupRecord:
    """A group with a deadline or without, explored or not, with and without weights, restarted or not."""
    count, cut_at = int(rng.integers(4, 13)), int(rng.integers(40, 80))
    has_deadline, has_weights = bool(rng.random() < 0.8), bool(rng.random() < 0.8)
    is_auto = bool(rng.random() < 0.2)
    version = int(rng.integers(0, 3))

    def candidate(index: int) -> CandidateRecord:
        tokens = int(rng.integers(0, 120))
        finish = [FinishReason.STOP, FinishReason.LENGTH, None][int(rng.integers(3))]
        is_selected = index < 4
        cut = has_deadline and is_selected and tokens > cut_at
        return CandidateRecord(
            index=index,
            tokens=cut_at if cut else tokens,
            finish_reason=FinishReason.LENGTH if cut else finish,
            selected_as=SelectedAs.SHORT if is_selected else None,
            reason=None,
            cut=cut,
            started_at=0.0,
            ended_at=1.0,
            weight_version_start=version,
            weight_version_end=version,
            weight=float(rng.random() + 1) if has_weights and is_selected else None,
        )

    return GroupRecord(
        group_id="g",
        prompt_key=key or f"p{rng.integers(5)}",
        policy="auto" if is_auto else POLICY,
        size=4,
        outcome=Outcome.COMPLETED if rng.random() < 0.9 else Outcome.CANCELLED,
        candidates=[candidate(index) for index in range(count)],
        started_at=0.0,
        ended_at=1.0,
        tail_wait=None,
        cohort_deadline=cut_at if has_deadline else None,
        max_lost=MaxLost() if has_deadline else None,
        stretch=1.25,
        bound=2 * cut_at if has_deadline else None,
        completion_length=None if rng.random() < 0.2 else 50,
        explored=has_deadline and bool(rng.random() < 0.5),
        tokens_needed=None if rng.random() < 0.2 else 50,
        chosen=ChosenOption("cap at 0.9", "because") if is_auto else None,
        owner="someone",
    )


def play(learner: Learner, rng: np.random.Generator, groups: int) -> None:
    """End groups, some of which are rewarded, and decide about explorations."""
    for _ in range(groups):
        record = random_group(rng)
        learner.end(record)
        if record.outcome is Outcome.COMPLETED and rng.random() < 0.7:
            learner.reward(record, {c.index: bool(rng.random() < 0.5) for c in record.selected})
        if rng.random() < 0.2:
            learner.explore()
