from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.latency import LatencyCurve
from darts_server.policy.simulation.batch import Batch
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.simulation.baselines import rollout_bound, shortest_lengths
from tests.policy.simulation.worlds import WHOLE, token_by_token, world


@pytest.mark.parametrize("policy", WHOLE)
def test_no_policy_that_returns_whole_trajectories_is_faster(policy: str) -> None:
    shares = []
    for seed in range(12):
        case = world(policy, seed)
        case.plan = replace(case.plan, enough=None)
        seconds = token_by_token(case).seconds
        shares.append(rollout_bound(case.batch, case.plan.size, case.machine) / seconds)
    assert max(shares) <= 1 + 1e-9
    assert max(shares) > 0.5


def batch(*lengths: list[int]) -> Batch:
    return Batch(np.full(len(lengths), 1), np.asarray(lengths), np.full((len(lengths), len(lengths[0])), 0.5), 100)


def test_the_bound_is_reached_where_one_trajectory_decides() -> None:
    machine = Machine(StepTime(LatencyCurve((1.0,), (2.0,)), per_prefill_token=3.0, per_start=0.5), replicas=4)
    assert rollout_bound(batch([7, 50]), 1, machine) == 7 * 2 + 3 + 0.5


def test_the_bound_is_reached_where_all_places_are_always_taken() -> None:
    machine = Machine(StepTime(LatencyCurve((1.0, 4.0), (1.0, 2.0)), per_start=0.5), replicas=2, max_num_seqs=4)
    # Eight trajectories of 10 tokens on two engines of four places: ten steps of 2 s, and four starts on each engine.
    assert rollout_bound(batch(*[[10, 10]] * 4), 2, machine) == pytest.approx(20 + 4 * 0.5)


def test_the_shortest_candidates_of_each_prompt_count() -> None:
    assert shortest_lengths(batch([9, 2, 200], [5, 5, 1]), 2).tolist() == [[2, 9], [1, 5]]
