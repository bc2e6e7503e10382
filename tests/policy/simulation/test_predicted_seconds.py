"""The seconds that are predicted for a mean number of candidates."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.batch import BatchPlan
from darts_server.policy.simulation.forecast import Expectation, forecast, predict_seconds
from darts_server.policy.simulation.machine import Machine, StepTime

Floats = NDArray[np.float64]

SIZE, HIGH, MEAN = 8, 16, 300.0
FLAT = LatencyCurve((1.0,), (0.02,))
GPU = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)
UNLIMITED = {"max_num_seqs": 1 << 20}

MIDDLES = (np.arange(4000) + 0.5) / 4000
EXPONENTIAL = -np.log(1 - MIDDLES)
NARROW = np.sort(np.random.default_rng(0).lognormal(-0.02, 0.2, 2000))
WIDE = np.sort(np.random.default_rng(0).lognormal(-0.125, 0.5, 2000))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def prompts(count: int, ratios: Floats = EXPONENTIAL) -> Expectation:
    return Expectation([MEAN] * count, [None] * count, ratios)


def policy(longest: int = 1, most: float = HIGH / SIZE) -> Shaping:
    return Shaping(budget=BudgetKind.CV_LOG, num_longest=longest, redundancy=1.0, max_redundancy=most)


def predicted(shaping: Shaping, mean: float = 12, size: int = SIZE) -> float:
    return predict_seconds(mean, shaping, size, prompts(32, WIDE), Machine(StepTime(GPU), **UNLIMITED), rng())


def test_what_prunes_is_forecast_as_its_choice_by_length() -> None:
    by_length = policy()
    pruning = replace(by_length, pruning=Pruning(), refill=True)
    for shaping in (pruning, replace(pruning, sample_survivors=True)):
        assert predicted(shaping) == predicted(by_length)


def test_a_group_of_one_has_no_tail() -> None:
    assert predicted(policy(), 1, 1) > predicted(policy(), 2, 1) > 0


def test_a_batch_is_predicted_with_any_mean_that_is_wanted() -> None:
    expectation, machine = prompts(32, WIDE), Machine(StepTime(GPU), **UNLIMITED)
    batches = expectation.sample(HIGH, rng())
    for wanted, used in ((11.5, 11.5), (1, SIZE), (99, HIGH)):
        plan = BatchPlan.of(policy(), SIZE, expectation.stds, used)
        assert predicted(policy(), wanted) == forecast(plan, batches, machine).seconds


@pytest.mark.parametrize("places", [16, 40, 64, 300])
def test_a_large_batch_takes_as_long_as_all_of_it(places: int) -> None:
    """Of 2,000 prompts 256 are simulated: a place stands for 8 sequences, so that 64 are 8, and 300 not 38."""
    expectation, machine = prompts(2000, NARROW), Machine(StepTime(GPU), max_num_seqs=places)
    plan = BatchPlan.of(policy(longest=1), SIZE, expectation.stds, 12)
    whole = forecast(plan, expectation.sample(12, rng(), 1), machine)
    found = predict_seconds(12, policy(longest=1), SIZE, expectation, machine, rng())
    assert found == pytest.approx(whole.seconds, rel=0.03)


def test_a_large_batch_of_large_groups_keeps_its_deadline() -> None:
    wide = replace(policy(longest=1, most=150.0), deadline=Deadline())
    expectation, machine = prompts(64, EXPONENTIAL), Machine(StepTime(FLAT), **UNLIMITED)
    cut, whole = (
        predict_seconds(12, shaping, SIZE, expectation, machine, rng())
        for shaping in (wide, replace(wide, deadline=None))
    )
    assert cut < 0.8 * whole
