"""The simulated rollout with drafts: against random acceptance step by step, and against the rollout without drafts."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.random import default_rng

from darts_server.drafts.lengths import MAX_DRAFT_TOKENS, count_worthwhile
from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats
from darts_server.offline.simulation.model.engines import Machine, StepTime
from darts_server.offline.simulation.model.rollout import simulate
from tests.offline.simulation.model.worlds import POLICIES, world

H200 = LatencyCurve((1.0, 64.0, 256.0, 512.0, 2048.0), (0.0052, 0.0063, 0.0116, 0.0210, 0.0778), 3.7e-5)
"""Measured decode steps of an 8B model."""
FLAT = LatencyCurve((1.0,), (1.0,))
SIZES = np.unique(np.concatenate([np.arange(1.0, 65.0), np.geomspace(64, 2048, 60).round()]))


def chances_of(acceptance: float, most: int = MAX_DRAFT_TOKENS) -> tuple[float, ...]:
    return tuple((acceptance ** np.arange(1, most + 1)).tolist())


def step_seconds(rows: int, most: int) -> Floats:
    """Return the seconds of steps with 0 to ``most`` drafted tokens."""
    return H200.step_seconds_array(np.arange(rows, rows + most + 1, dtype=np.float64))


def one_group(lengths: list[int]) -> tuple[Batch, BatchPlan]:
    draws = np.zeros((1, len(lengths)))
    return Batch(np.ones(1, np.int64), np.asarray([lengths]), draws, 100_000), BatchPlan(len(lengths), [len(lengths)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafts", [(), (0.0,), (0.0,) * MAX_DRAFT_TOKENS])
def test_drafts_that_are_never_accepted_change_nothing(policy: str, drafts: tuple[float, ...]) -> None:
    for seed in range(4):
        case = world(policy, seed)
        with_drafts = replace(case.machine, step_time=replace(case.machine.step_time, drafts=drafts))
        found = simulate(case.batch, case.plan, with_drafts)
        without = simulate(case.batch, case.plan, case.machine)
        assert found.seconds == without.seconds
        assert found.deadline == without.deadline
        assert np.array_equal(found.completed_at, without.completed_at)
        assert np.array_equal(found.generated, without.generated)
        assert np.array_equal(found.returned, without.returned)


def test_a_step_generates_the_accepted_tokens_and_one_more() -> None:
    batch, plan = one_group([7])
    found = simulate(batch, plan, Machine(StepTime(FLAT, drafts=(0.5, 0.25))))
    assert found.seconds == 4


def test_the_context_is_read_once_in_a_step() -> None:
    batch, plan = one_group([2])
    found = simulate(batch, plan, Machine(StepTime(FLAT, per_context_token=0.25, drafts=(1.0,))))
    # Half of a step with a context of one token, and half of a step with two.
    assert found.seconds == (1 + 0.25) / 2 + (1 + 0.5) / 2


def test_a_long_context_makes_drafts_worth_more() -> None:
    curve = LatencyCurve((1.0, 2.0), (1.0, 1.8), 0.8)
    for per_context_token, tokens_a_step in ((0.0, 1.0), (1.0, 1.5)):
        times = StepTime(curve, per_context_token, drafts=(0.5,))
        without = replace(times, drafts=())
        seconds, _ = times.seconds_per_token(np.ones(1), np.full(1, 100.0))
        alone, _ = without.seconds_per_token(np.ones(1), np.full(1, 100.0))
        assert alone / seconds == pytest.approx(tokens_a_step, rel=0.01)


@pytest.mark.untraced
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_a_rollout_takes_as_long_as_with_random_acceptance_step_by_step(acceptance: float) -> None:
    lengths = default_rng(0).lognormal(5.5, 0.8, 128).astype(int)
    batch, plan = one_group(lengths.tolist())
    chances = chances_of(acceptance)
    found = simulate(batch, plan, Machine(StepTime(H200, drafts=chances)))

    rng = default_rng(1)
    left = lengths.copy()
    expected = 0.0
    while left.size:
        rows = left.size
        flat = np.repeat(chances, rows)
        worth = count_worthwhile(rows, flat, step_seconds(rows, flat.size))
        # The rows' drafts differ by one token at most.
        drafted = worth // rows + (rng.permutation(rows) < worth % rows)
        is_right = (rng.random((rows, MAX_DRAFT_TOKENS)) < acceptance).cumprod(axis=1)
        left = left - 1 - (is_right * (np.arange(MAX_DRAFT_TOKENS) < drafted[:, None])).sum(axis=1)
        left = left[left > 0]
        expected += H200.step_seconds(rows + worth)
    assert found.seconds == pytest.approx(expected, rel=0.04)


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("acceptance", [0.01, 0.2, 0.5, 0.7, 0.9, 0.99])
def test_no_number_of_sequences_is_slower_with_drafts(acceptance: float, seed: int) -> None:
    """On the measured curve, and on random curves that rise."""
    curve = H200
    if seed:
        rng = default_rng(seed)
        curve = LatencyCurve(
            H200.batches, tuple(np.cumsum(rng.exponential(1, 5)).tolist()), float(rng.exponential(0.01))
        )
    context = SIZES * 500
    times = StepTime(curve, per_context_token=1e-8)
    without, _ = times.seconds_per_token(SIZES, context)
    seconds, _ = replace(times, drafts=chances_of(acceptance)).seconds_per_token(SIZES, context)
    assert (seconds <= without * (1 + 1e-12)).all()
    if not seed:
        assert seconds[0] < without[0]


TOKENS = 580
"""Mean length of DAPO's answers."""
PRIOR = 4
"""Tokens for which the assumed acceptance counts at first, as in the server's table."""


@pytest.mark.untraced
@pytest.mark.parametrize("assumed", [0.5, 0.8])
@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3])
def test_a_wrong_acceptance_costs_at_most_2_percent_until_it_is_learned(assumed: float, acceptance: float) -> None:
    real = np.asarray(chances_of(acceptance))
    for size in (1, 2, 5, 16, 40, 64, 100, 200, 256, 400, 512, 1024, 2048):
        tries = float(PRIOR)
        hits = assumed * PRIOR
        tokens = 0.0
        seconds = 0.0
        while tokens < TOKENS:
            flat = np.repeat(chances_of(hits / tries), size)
            worth = count_worthwhile(size, flat, step_seconds(size, flat.size))
            drafted: Floats = np.clip((worth - np.arange(MAX_DRAFT_TOKENS) * size) / size, 0, 1)
            right = drafted * real
            # A token is a try if all tokens before it were right.
            tries += size * float(drafted @ np.concatenate([[1.0], real[:-1]]))
            hits += size * float(right.sum())
            tokens += 1 + float(right.sum())
            seconds += H200.step_seconds(size + worth)
        assert seconds <= 1.02 * tokens * H200.step_seconds(size), size
