"""The seconds of a cohort are predicted by a simulation of it as it will be allocated."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from darts_server.engine.port import RequestTokens
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Latency, Statistics
from darts_server.types import DiscardReason, FinishReason, Outcome
from tests.rollout.helpers import Documents

SIZE = 8
KEYS = [f"p{number}" for number in range(64)]
ADAPTIVE = Shaping(adaptive=True, budget=BudgetKind.CV_LOG)


class KnownLatency(Latency):
    cost: float | None = None
    curves = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)

    def _learned(self) -> Any:
        return SimpleNamespace(curve=self.curves, start_seconds=self.cost)


@pytest.fixture(scope="module")
def learned() -> Statistics:
    return asyncio.run(learn())


async def learn() -> Statistics:
    """Of 64 prompts, half are three times as long as the others."""
    statistics, rng = Statistics(Documents()), np.random.default_rng(0)
    for number, key in enumerate(KEYS):
        for _ in range(4):
            lengths = np.rint((300 if number % 2 else 100) * rng.lognormal(-0.125, 0.5, 16)).astype(int)
            candidates = tuple(
                CandidateRecord(k, int(n), FinishReason.STOP, None, DiscardReason.MIDDLE, False, 0.0, 1.0, 3, 4)
                for k, n in enumerate(lengths)
            )
            statistics.group_ended(GroupRecord("g", key, "uniform", SIZE, Outcome.COMPLETED, candidates, 0.0, 1.0, 0.5))
    statistics.flush()
    return statistics


def seconds(
    learned: Statistics,
    mean: float,
    shaping: Shaping = ADAPTIVE,
    keys: Sequence[str] = KEYS,
    tokens: Sequence[RequestTokens] = (),
    latency: Latency | None = None,
) -> float:
    learned.latency = KnownLatency(Documents()) if latency is None else latency
    found = learned.predict_seconds(mean, shaping, SIZE, [learned.prompts.load(key) for key in keys], tokens)
    assert found is not None
    return found


def test_what_candidates_cost_when_they_start_is_added(learned: Statistics) -> None:
    dear = KnownLatency(Documents())
    dear.cost = 0.02
    assert seconds(learned, 12, latency=dear) - seconds(learned, 12) == pytest.approx(0.02 * 12 * len(KEYS))


def test_a_deadline_bounds_what_is_predicted_and_its_stretch_moves_it(learned: Statistics) -> None:
    whole, cut, later = (
        seconds(learned, 10, replace(ADAPTIVE, deadline=rule)) for rule in (None, Deadline(), Deadline(stretch=2.0))
    )
    assert 0 < cut < 0.8 * whole
    assert cut < later


def test_no_trajectory_is_longer_than_its_request_allows(learned: Statistics) -> None:
    limited, whole = [RequestTokens(most=150)] * len(KEYS), seconds(learned, 12)
    assert seconds(learned, 12, tokens=limited) < 0.7 * whole
    assert seconds(learned, 12, tokens=[*limited[1:], RequestTokens()]) == whole, "one has no limit"


def test_prompts_take_room_in_the_kv_cache(learned: Statistics) -> None:
    little = KnownLatency(Documents(), kv_tokens=60_000)
    little.curves = LatencyCurve((1.0,), (0.02,))  # so that only what waits takes longer
    long = [RequestTokens(2000)] * len(KEYS)
    assert seconds(learned, 12, tokens=long, latency=little) > 1.3 * seconds(learned, 12, latency=little)


def test_prompts_that_were_never_seen_are_like_the_others(learned: Statistics) -> None:
    mixed = [*KEYS[:32], *(f"new {number}" for number in range(32))]
    assert seconds(learned, 12, keys=mixed) == pytest.approx(seconds(learned, 12), rel=0.2)


def test_a_few_prompts_say_too_little_for_a_prediction(learned: Statistics) -> None:
    assert learned.predict_seconds(12, ADAPTIVE, SIZE, [None] * 7) is None


def test_what_does_not_fit_into_the_engine_queues(learned: Statistics) -> None:
    for queued in (KnownLatency(Documents(), 64), KnownLatency(Documents(), kv_tokens=4_000)):
        assert seconds(learned, 12, latency=queued) > 1.3 * seconds(learned, 12)
