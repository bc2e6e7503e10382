"""The simulated rollout, against a simulation token by token, a replay, and figures computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.candidate import Candidate
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import Batch, Plan
from darts_server.policy.simulation.machine import Machine, StepTime
from darts_server.policy.simulation.rollout import place_groups, simulate
from darts_server.types import FinishReason
from examples.tiny_rl.replay import replay
from tests.policy.simulation.worlds import NAMED, POLICIES, token_by_token, world

SECOND = StepTime(LatencyCurve((1.0,), (1.0,)))


def batch(lengths: list[list[int]], prompt: int = 1, max_tokens: int = 1000) -> Batch:
    shape = (len(lengths), len(lengths[0]))
    draws = np.arange(shape[0] * shape[1]).reshape(shape) / (shape[0] * shape[1])
    return Batch(np.full(len(lengths), prompt), np.asarray(lengths), draws, max_tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rollout_is_the_same_as_one_that_is_simulated_token_by_token(policy: str) -> None:
    preemptions = 0
    for seed in range(16):
        case = world(policy, seed)
        found, expected = simulate(case.batch, case.plan, case.machine), token_by_token(case)
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
        assert found.deadline == expected.deadline
        assert found.completed_at.tolist() == pytest.approx(expected.completed, rel=1e-9)
        assert [(r.group, r.index, r.tokens) for r in found.returned] == expected.returned
        for row, tokens in zip(found.generated.tolist(), expected.generated, strict=True):
            assert row[: len(tokens)] == tokens
        preemptions += found.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "limit"])  # a replay has no deadline
def test_a_group_on_an_engine_of_its_own_ends_as_in_a_replay(policy: str) -> None:
    for seed in range(10):
        case = world(policy, seed, replicas=1, room=100, groups=1)
        case.plan = replace(case.plan, enough=None)
        valid, ends, draws = case.batch.valid[0], case.batch.ends[0].tolist(), case.batch.tail_draws[0].tolist()
        reasons = [FinishReason.STOP if v else FinishReason.LENGTH for v in valid]
        candidates = [
            Candidate(i, draws[i], tokens=ends[i], finish_reason=reasons[i]) for i in range(case.plan.candidates[0])
        ]
        played = replay(case.plan.rule(0), candidates)
        found = simulate(case.batch, case.plan, replace(case.machine, step_time=SECOND))
        assert found.seconds == played.steps
        assert tuple(found.generated[0, : len(candidates)].tolist()) == played.lengths
        assert tuple(r.index for r in found.returned) == played.selection


# --- computed by hand ---------------------------------------------------------


def test_a_step_costs_what_runs_what_it_reads_and_what_is_prefilled() -> None:
    times = StepTime(LatencyCurve((1.0, 2.0), (1.0, 3.0)), per_context_token=0.1, per_prefill_token=0.01)
    found = simulate(batch([[2, 4]], prompt=20), Plan(2, [2]), Machine(times))
    # Step 1 prefills 20 tokens, and the 4 of the second candidate that are not in a full block of the first's.
    first = 3.0 + 0.1 * 40 + 0.01 * 24
    assert found.ended_at.tolist()[0] == pytest.approx(
        [first + 3.0 + 0.1 * 42, first + 7.2 + (1.0 + 0.1 * 22) + (1.0 + 0.1 * 23)]
    )
    assert found.busy == pytest.approx((2 * (first + 7.2) + 6.5) / (2 * found.seconds))


def test_a_step_takes_longer_by_what_each_candidate_costs_that_starts_in_it() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_start=0.5)
    found = simulate(batch([[5, 2], [3, 4]]), Plan(2, [2, 2]), Machine(times, max_num_seqs=2))
    # Two start at once, the third when the second ends after two steps, the fourth when the others end after five.
    assert found.started_at.tolist() == [[0, 0], [2 + 1.0, 5 + 1.5]]
    assert found.seconds == 9 + 4 * 0.5


def test_candidates_beyond_the_places_wait_in_order() -> None:
    found = simulate(batch([[5, 2], [3, 4]]), Plan(2, [2, 2]), Machine(SECOND, max_num_seqs=2))
    assert found.started_at.tolist() == [[0, 0], [2, 5]]
    assert found.completed_at.tolist() == [5, 9]
    assert (found.seconds, found.replicas.tolist()) == (9, [0, 0])


def test_the_last_admitted_is_preempted_and_prefilled_again() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_prefill_token=0.5)
    machine = Machine(times, kv_blocks=3, block_size=4)
    # Prompts of 3 tokens: a block each at first, a second one each for the second token after that: one too many.
    found = simulate(batch([[6], [6]], prompt=3), Plan(1, [1, 1]), machine)
    # Both prefill in step 1. After 2 tokens the second gives way; the first goes on alone to its 6th; then the second
    # prefills 3 + 2 tokens, and needs 4 more steps.
    assert found.preemptions == 1
    assert found.completed_at.tolist() == pytest.approx([3 + 6, 9 + 2.5 + 4])


def test_a_sequence_that_no_engine_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="2 KV blocks are too few for 10 \\+ 30 tokens"):
        simulate(batch([[30]], prompt=10), Plan(1, [1]), Machine(SECOND, kv_blocks=2))


def test_completion_lengths_are_those_of_complete_groups_in_order_and_0_for_one_that_was_cut_without() -> None:
    lengths = [[9, 9], [7, 7], *[[8, 8]] * 7, [900, 900], [900, 900]]
    plan = Plan(2, [2] * 11, NAMED["cap"])
    found = simulate(batch(lengths), plan, Machine(SECOND))
    assert (found.deadline, found.completion_lengths) == (9, (7, *[8] * 7, 9, 0, 0))
    found = simulate(batch(lengths), replace(plan, enough=2), Machine(SECOND))
    assert found.completion_lengths == (7, 8)


def test_a_rollout_with_enough_groups_stops_the_others() -> None:
    found = simulate(batch([[5, 2], [30, 4], [6, 1]]), Plan(2, [2, 2, 2], enough=2), Machine(SECOND))
    assert (found.seconds, found.generated.tolist()) == (6, [[5, 2], [6, 4], [6, 1]])
    assert found.completed_at.tolist() == [5, float("inf"), 6]
    assert {r.group for r in found.returned} == {0, 2}


def test_candidates_of_earlier_rollouts_go_on_where_they_were() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_prefill_token=0.5)
    going_on = replace(batch([[5, 20]], prompt=2), done=np.asarray([[4, 0]]))
    found = simulate(going_on, Plan(2, [2]), Machine(times))
    assert found.generated.tolist() == [[1, 20]]
    assert found.seconds == 20 + 0.5 * (2 + 4 + 2)


def test_candidates_that_earlier_rollouts_finished_need_no_engine() -> None:
    first = replace(batch([[5, 9], [4, 4]], prompt=2), done=np.asarray([[5, 0], [4, 4]]))
    found = simulate(first, Plan(2, [2, 2]), Machine(SECOND))
    assert found.generated.tolist() == [[0, 9], [0, 0]]
    assert found.completed_at.tolist() == [9, 0]
    assert [(r.group, r.tokens) for r in found.returned] == [(0, 5), (0, 9), (1, 4), (1, 4)]


def test_weights_and_truncation_are_the_groups() -> None:
    found = simulate(batch([[9, 2, 3, 50]], max_tokens=40), Plan(2, [4], Shaping()), Machine(SECOND))
    # The lowest draw of the three others wins the tail; four of them count, of which the shortest is certain.
    assert [(r.index, r.tokens, r.truncated, r.weight) for r in found.returned] == [(0, 9, False, 3), (1, 2, False, 1)]
    found = simulate(batch([[50, 2]], max_tokens=40), Plan(2, [2]), Machine(SECOND))
    assert [(r.tokens, r.truncated) for r in found.returned] == [(40, True), (2, False)]


def test_groups_go_to_the_engine_with_the_fewest_candidates() -> None:
    assert place_groups([4, 2, 1, 3, 1], 2) == [0, 1, 1, 1, 0]
