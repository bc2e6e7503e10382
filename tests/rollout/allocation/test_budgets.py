"""The utility budget is decided by a simulation of the cohort as it will be allocated."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

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


def test_an_adaptive_policys_budget_counts_on_its_saturated_prompts(budgets: Budgets) -> None:
    even = budgets.decide(replace(ADAPTIVE, adaptive=False), SIZE, KEYS)
    adaptive = budgets.decide(ADAPTIVE, SIZE, KEYS)
    assert adaptive.mean > even.mean
    assert (adaptive.seconds or 0) < (even.seconds or 0)


def test_what_candidates_cost_when_they_start_makes_more_of_them_worth_less(budgets: Budgets) -> None:
    latency = KnownLatency(Documents())
    latency.cost = 0.02
    dear = Budgets(budgets._prompts, budgets._dataset, latency, clock=lambda: 0.0)
    fixed = replace(ADAPTIVE, budget=BudgetKind.FIXED)
    more = (dear.decide(fixed, SIZE, KEYS).seconds or 0) - (budgets.decide(fixed, SIZE, KEYS).seconds or 0)
    assert more == pytest.approx(0.02 * 1.5 * SIZE * len(KEYS))
    assert dear.decide(ADAPTIVE, SIZE, KEYS).mean < budgets.decide(ADAPTIVE, SIZE, KEYS).mean


def test_a_deadline_bounds_what_is_predicted(budgets: Budgets) -> None:
    fixed = replace(ADAPTIVE, budget=BudgetKind.FIXED, redundancy=1.25)
    whole, cut = (budgets.decide(replace(fixed, deadline=rule), SIZE, KEYS) for rule in (None, Deadline()))
    assert 0 < (cut.seconds or 0) < 0.8 * (whole.seconds or 0)


@pytest.mark.parametrize("capacity", [None, 64])
def test_a_batch_that_is_divided_is_predicted_as_one_server_predicts_its_share(
    budgets: Budgets, capacity: int | None
) -> None:
    latency = KnownLatency(Documents(), capacity)
    latency.cost, latency.curves = 0.001, LatencyCurve((1.0, 64.0, 128.0), (0.02, 0.02, 0.04), 0.0005)
    known = Budgets(budgets._prompts, budgets._dataset, latency, clock=lambda: 0.0)
    fixed = replace(ADAPTIVE, budget=BudgetKind.FIXED)
    share, whole = KEYS[:16], [key for key in KEYS[:16] for _ in range(4)]
    for shaping in (fixed, ADAPTIVE):
        expected, found = known.decide(shaping, SIZE, share), known.decide(shaping, SIZE, whole, servers=4)
        assert found.mean == pytest.approx(expected.mean, abs=1)
        # The last of four times as many candidates is longer.
        assert (expected.seconds or 0) < (found.seconds or 0) < 1.1 * (expected.seconds or 0)
    alone = known.decide(ADAPTIVE, SIZE, whole)
    assert alone.mean < expected.mean - 2
    assert (alone.seconds or 0) > 2 * (expected.seconds or 0)


def test_a_few_prompts_of_a_batch_that_is_divided_have_a_decision_of_their_own(budgets: Budgets) -> None:
    latency = KnownLatency(Documents())
    latency.curves = LatencyCurve((1.0, 64.0, 128.0), (0.02, 0.02, 0.04), 0.0005)
    known = Budgets(budgets._prompts, budgets._dataset, latency, clock=lambda: 0.0)
    known.decide(ADAPTIVE, SIZE, KEYS)
    for servers in (1, 16):
        expected = known.decide(ADAPTIVE, SIZE, KEYS, servers=servers).mean
        assert known.decide(ADAPTIVE, SIZE, KEYS[:2], servers=servers).mean == pytest.approx(expected, abs=0.5)
    few = [known.decide(ADAPTIVE, SIZE, KEYS[:2], servers=servers).mean for servers in (1, 16)]
    assert few[1] > few[0]
