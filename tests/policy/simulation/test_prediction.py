"""The prediction, against the simulation that drives groups."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from darts_server.policy.simulation.machine import Machine
from darts_server.policy.simulation.prediction import predict
from darts_server.policy.simulation.rollout import simulate
from tests.policy.simulation.worlds import POLICIES, RECENT, World, world


def busy_world(policy: str, seed: int) -> World:
    """More candidates than an engine runs at once, on several engines."""
    case = world(policy, seed, replicas=2, room=40, groups=40)
    return World(case.batch, replace(case.plan, enough=None), case.machine)


@pytest.mark.parametrize("policy", POLICIES)
def test_where_all_candidates_start_together_the_prediction_is_exact(policy: str) -> None:
    deadlines = 0
    for seed in range(80 if policy in RECENT else 40):
        case = world(policy, seed, replicas=1, room=1000, groups=13 * (seed % 2))
        case.plan = replace(case.plan, enough=None)
        found, simulated = predict(case.batch, case.plan, case.machine), simulate(case.batch, case.plan, case.machine)
        assert found.seconds == pytest.approx(simulated.seconds, rel=1e-9)
        assert found.completed_at.tolist() == pytest.approx(simulated.completed_at.tolist(), rel=1e-9)
        assert found.generated.tolist() == simulated.generated.tolist()
        assert found.deadline == simulated.deadline
        returned, truncated = np.zeros(case.batch.lengths.shape), np.zeros(case.batch.lengths.shape, dtype=bool)
        for one in simulated.returned:
            returned[one.group, one.index], truncated[one.group, one.index] = one.tokens, one.truncated
        assert found.returned.tolist() == returned.tolist()
        assert found.truncated.tolist() == truncated.tolist()
        deadlines += found.deadline is not None
    assert (deadlines > 0) == (policy in ("darts_cut", "cap", "limit", *RECENT))


@pytest.mark.parametrize("policy", RECENT)
def test_some_of_these_worlds_are_bounded_by_the_deadline_of_earlier_groups_and_others_are_not(policy: str) -> None:
    bounded = []
    for seed in range(1, 80, 2):
        case = world(policy, seed, replicas=1, room=1000, groups=13)
        plan, shaping = replace(case.plan, enough=None), case.plan.shaping
        assert shaping is not None
        assert shaping.deadline is not None
        alone = replace(plan, shaping=replace(shaping, deadline=replace(shaping.deadline, recent=None)))
        with_recent, without = (simulate(case.batch, each, case.machine) for each in (plan, alone))
        assert with_recent.seconds <= without.seconds * (1 + 1e-9)
        bounded.append(with_recent.seconds < 0.9 * without.seconds)
    assert 5 < sum(bounded) < 35


@pytest.mark.parametrize("policy", ["off", "uniform", "darts", "longest", "none"])
def test_of_enough_groups_the_prediction_has_the_first(policy: str) -> None:
    for seed in range(20):
        case = world(policy, seed, replicas=1, room=1000, groups=13)
        case.plan = replace(case.plan, enough=9)
        found, simulated = predict(case.batch, case.plan, case.machine), simulate(case.batch, case.plan, case.machine)
        assert found.seconds == pytest.approx(simulated.seconds, rel=1e-9)
        assert found.generated.tolist() == simulated.generated.tolist()
        assert np.isfinite(found.completed_at).sum() == 9
        assert (found.returned.sum(axis=1) > 0).sum() == 9


def errors(policy: str, machine: Machine | None = None, prompt_tokens: int | None = None) -> list[float]:
    """Relative errors of predicted seconds."""
    found = []
    for seed in range(10):
        case = busy_world(policy, seed)
        if prompt_tokens is not None:
            case.batch = replace(case.batch, prompt_tokens=np.full(case.batch.groups, prompt_tokens))
        used = machine or case.machine
        seconds = simulate(case.batch, case.plan, used).seconds
        found.append(abs(predict(case.batch, case.plan, used).seconds / seconds - 1))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_where_candidates_queue_the_prediction_is_close(policy: str) -> None:
    assert median(errors(policy)) < 0.03
    assert max(errors(policy)) < 0.15


@pytest.mark.parametrize("policy", ["off", "uniform"])
def test_kv_blocks_count_by_what_they_hold_on_average(policy: str) -> None:
    machine = replace(busy_world(policy, 0).machine, kv_blocks=150, block_size=16)
    assert median(errors(policy, machine)) < 0.1


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("policy", ["off", "uniform"])
def test_a_long_prompt_takes_kv_blocks_once_for_all_its_candidates(policy: str, block_size: int) -> None:
    machine = replace(busy_world(policy, 0).machine, kv_blocks=3200 // block_size, block_size=block_size)
    assert median(errors(policy, machine, 400)) < 0.15
    case = busy_world(policy, 0)
    short, long = (replace(case.batch, prompt_tokens=np.full(case.batch.groups, tokens)) for tokens in (1, 400))
    assert predict(long, case.plan, machine).seconds > 1.2 * predict(short, case.plan, machine).seconds


def test_candidates_of_earlier_rollouts_are_not_predicted() -> None:
    case = world("off", 0)
    with pytest.raises(ValueError, match="cannot be predicted"):
        predict(replace(case.batch, done=np.zeros_like(case.batch.lengths)), case.plan, case.machine)


@pytest.mark.parametrize("policy", ["darts_cut", "cap"])
def test_there_is_no_deadline_where_all_groups_are_truncated(policy: str) -> None:
    case = world(policy, 1, replicas=1, room=1000, groups=10)
    batch = replace(case.batch, lengths=np.full_like(case.batch.lengths, case.batch.max_tokens))
    plan = replace(case.plan, enough=None)
    found, simulated = predict(batch, plan, case.machine), simulate(batch, plan, case.machine)
    assert found.deadline is simulated.deadline is None
    assert found.seconds == pytest.approx(simulated.seconds)
    assert found.truncated.sum() == len(simulated.returned) == 10 * plan.size
