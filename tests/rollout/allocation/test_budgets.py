"""The utility budget is decided by a simulation of the cohort as it will be allocated."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from darts_server.engine.port import RequestTokens
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation.budgets import Budgets
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.statistics import Statistics
from darts_server.types import DiscardReason, FinishReason, Outcome
from tests.rollout.helpers import Documents

SIZE = 8
KEYS = [f"p{number}" for number in range(64)]
ADAPTIVE = Shaping(adaptive=True, budget=BudgetKind.UTILITY)


class KnownLatency(Latency):
    cost: float | None = None
    curves = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)

    @property
    def start_seconds(self) -> float | None:
        return self.cost

    @property
    def curve(self) -> LatencyCurve:
        return self.curves


@pytest.fixture(scope="module")
def budgets() -> Budgets:
    return asyncio.run(learned_budgets())


async def learned_budgets() -> Budgets:
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
    return Budgets(statistics.prompts, statistics.dataset, KnownLatency(Documents()), clock=lambda: 0.0)


def known(budgets: Budgets, capacity: int | None = None, kv_tokens: int | None = None) -> tuple[Budgets, KnownLatency]:
    """Return budgets with the same statistics and a latency of their own."""
    latency = KnownLatency(Documents(), capacity, kv_tokens)
    return Budgets(budgets._prompts, budgets._dataset, latency, clock=lambda: 0.0), latency


def seconds(
    budgets: Budgets,
    mean: float,
    shaping: Shaping = ADAPTIVE,
    keys: Sequence[str] = KEYS,
    tokens: Sequence[RequestTokens] = (),
) -> float:
    found = budgets.seconds(mean, shaping, SIZE, keys, tokens)
    assert found is not None
    return found


def test_an_adaptive_policys_budget_counts_on_its_saturated_prompts(budgets: Budgets) -> None:
    even = replace(ADAPTIVE, adaptive=False)
    fewer, more = budgets.mean(even, SIZE, KEYS), budgets.mean(ADAPTIVE, SIZE, KEYS)
    assert more > fewer
    assert seconds(budgets, more) < seconds(budgets, fewer, even)


def test_what_candidates_cost_when_they_start_makes_more_of_them_worth_less(budgets: Budgets) -> None:
    dear, latency = known(budgets)
    latency.cost = 0.02
    assert seconds(dear, 12) - seconds(budgets, 12) == pytest.approx(0.02 * 12 * len(KEYS))
    assert dear.mean(ADAPTIVE, SIZE, KEYS) < budgets.mean(ADAPTIVE, SIZE, KEYS)


def test_a_deadline_bounds_what_is_predicted_and_its_stretch_moves_it(budgets: Budgets) -> None:
    whole, cut, later = (
        seconds(budgets, 10, replace(ADAPTIVE, deadline=rule)) for rule in (None, Deadline(), Deadline(stretch=2.0))
    )
    assert 0 < cut < 0.8 * whole
    assert cut < later


def test_no_trajectory_is_longer_than_its_request_allows(budgets: Budgets) -> None:
    limited, whole = [RequestTokens(most=150)] * len(KEYS), seconds(budgets, 12)
    assert seconds(budgets, 12, tokens=limited) < 0.7 * whole
    assert seconds(budgets, 12, tokens=[*limited[1:], RequestTokens()]) == whole, "one has no limit"
    assert budgets.mean(ADAPTIVE, SIZE, KEYS, limited) < budgets.mean(ADAPTIVE, SIZE, KEYS), "there is less to shorten"


def test_prompts_take_room_in_the_kv_cache(budgets: Budgets) -> None:
    little, latency = known(budgets, kv_tokens=60_000)
    latency.curves = LatencyCurve((1.0,), (0.02,))  # so that only what waits takes longer
    assert seconds(little, 12, tokens=[RequestTokens(2000)] * len(KEYS)) > 1.3 * seconds(little, 12)


def test_prompts_that_were_never_seen_are_like_the_others(budgets: Budgets) -> None:
    mixed = [*KEYS[:32], *(f"new {number}" for number in range(32))]
    assert seconds(budgets, 12, keys=mixed) == pytest.approx(seconds(budgets, 12), rel=0.2)


def test_a_few_prompts_say_too_little_for_a_prediction(budgets: Budgets) -> None:
    assert budgets.seconds(12, ADAPTIVE, SIZE, KEYS[:7]) is None


def test_what_does_not_fit_into_the_engine_queues(budgets: Budgets) -> None:
    few, _ = known(budgets, capacity=64)
    little, _ = known(budgets, kv_tokens=4_000)
    for queued in (few, little):
        assert seconds(queued, 12) > 1.3 * seconds(budgets, 12)


@pytest.mark.parametrize("capacity", [None, 64])
def test_a_batch_that_is_divided_has_the_budget_that_one_server_has_for_its_share(
    budgets: Budgets, capacity: int | None
) -> None:
    alone, latency = known(budgets, capacity)
    latency.cost, latency.curves = 0.001, LatencyCurve((1.0, 64.0, 128.0), (0.02, 0.02, 0.04), 0.0005)
    share, whole = KEYS[:16], [key for key in KEYS[:16] for _ in range(4)]
    expected = alone.mean(ADAPTIVE, SIZE, share)
    assert alone.mean(ADAPTIVE, SIZE, whole, servers=4) == pytest.approx(expected, abs=1)
    assert alone.mean(ADAPTIVE, SIZE, whole) < expected - 2


def test_a_batch_may_have_fewer_groups_than_servers(budgets: Budgets) -> None:
    assert SIZE <= budgets.mean(ADAPTIVE, SIZE, KEYS[:16], servers=1000) <= 2 * SIZE


def test_a_few_prompts_of_a_batch_that_is_divided_have_a_decision_of_their_own(budgets: Budgets) -> None:
    alone, latency = known(budgets)
    latency.curves = LatencyCurve((1.0, 64.0, 128.0), (0.02, 0.02, 0.04), 0.0005)
    alone.mean(ADAPTIVE, SIZE, KEYS)
    for servers in (1, 16):
        expected = alone.mean(ADAPTIVE, SIZE, KEYS, servers=servers)
        assert alone.mean(ADAPTIVE, SIZE, KEYS[:2], servers=servers) == pytest.approx(expected, abs=0.5)
    few = [alone.mean(ADAPTIVE, SIZE, KEYS[:2], servers=servers) for servers in (1, 16)]
    assert few[1] > few[0]
