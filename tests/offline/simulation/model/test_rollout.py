"""The simulated rollout, against a simulation token by token, and figures computed by hand."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.batch import Batch, BatchPlan
from darts_server.offline.simulation.model.engines import Machine, StepTime, place_groups
from darts_server.offline.simulation.model.rollout import Rollout, simulate
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail, build_policies
from tests.offline.simulation.model.worlds import NAMED, POLICIES, RECENT, Outcome, World, token_by_token, world

SECOND = StepTime(LatencyCurve((1.0,), (1.0,)))


def batch(lengths: list[list[int]], prompt: int = 1, max_tokens: int = 1000) -> Batch:
    shape = (len(lengths), len(lengths[0]))
    draws = np.arange(shape[0] * shape[1]).reshape(shape) / (shape[0] * shape[1])
    return Batch(np.full(len(lengths), prompt), np.asarray(lengths), draws, max_tokens)


def returned(found: Rollout) -> list[tuple[int, int, int, bool]]:
    places = np.argwhere(found.returned > 0).tolist()
    return [(g, i, int(found.returned[g, i]), bool(found.truncated[g, i])) for g, i in places]


def assert_same(found: Rollout, expected: Outcome) -> None:
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.deadline == expected.deadline
    assert found.completed_at.tolist() == pytest.approx(expected.completed, rel=1e-9)
    assert returned(found) == expected.returned
    for row, tokens in zip(found.generated.tolist(), expected.generated, strict=True):
        assert row[: len(tokens)] == tokens


@pytest.mark.untraced
@pytest.mark.parametrize("policy", POLICIES)
def test_if_all_candidates_start_together_the_result_equals_that_of_token_by_token(policy: str, nightly: bool) -> None:
    deadlines = 0
    for seed in range((80 if policy in RECENT else 40) // (1 if nightly else 4)):
        case = world(policy, seed, replicas=1, room=1000, groups=13 * (seed % 2))
        case.plan = replace(case.plan, needed_groups=None)
        found = simulate(case.batch, case.plan, case.machine)
        expected = token_by_token(case)
        assert_same(found, expected)
        if case.plan.deadline is not None:
            assert sorted(found.completion_lengths) == sorted(expected.completion_lengths)
        deadlines += found.deadline is not None
    assert (deadlines > 0) == (policy in ("darts_cut", "cap", *RECENT))


@pytest.mark.parametrize("policy", ["off", "longest"])
def test_if_no_candidate_is_stopped_the_result_is_exact_with_any_queue_and_full_kv_caches(policy: str) -> None:
    preemptions = 0
    for seed in range(12):
        case = world(policy, seed)
        longest = (case.batch.prompt_tokens[:, None] + case.batch.capped_lengths).max()
        case.machine = replace(case.machine, block_size=1, kv_blocks=int(longest * 1.5))
        expected = token_by_token(case)
        assert_same(simulate(case.batch, case.plan, case.machine), expected)
        preemptions += expected.preemptions
    assert preemptions > 10


@pytest.mark.untraced
@pytest.mark.parametrize("policy", ["off", "uniform", "darts", "longest", "none"])
def test_a_rollout_that_ends_with_enough_groups_returns_the_first_groups(policy: str, nightly: bool) -> None:
    for seed in range(20 if nightly else 6):
        case = world(policy, seed, replicas=1, room=1000, groups=13)
        case.plan = replace(case.plan, needed_groups=9)
        found = simulate(case.batch, case.plan, case.machine)
        assert_same(found, token_by_token(case))
        assert np.isfinite(found.completed_at).sum() == 9


def errors(policy: str, seeds: int, kv_blocks: int | None = None, size: int = 1, prompt: int = 0) -> list[float]:
    """Relative errors in seconds where more candidates wait than two engines run at once."""
    found = []
    for seed in range(seeds):
        case = world(policy, seed, replicas=2, room=40, groups=40)
        if prompt:
            case.batch = replace(case.batch, prompt_tokens=np.full(case.batch.groups, prompt))
        machine = replace(case.machine, kv_blocks=kv_blocks, block_size=size)
        case = World(case.batch, replace(case.plan, needed_groups=None), machine)
        found.append(abs(simulate(case.batch, case.plan, machine).seconds / token_by_token(case).seconds - 1))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_if_candidates_queue_the_result_is_close(policy: str) -> None:
    found = errors(policy, 5)
    assert median(found) < 0.03
    assert max(found) < 0.15


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("kv_blocks", "size", "prompt"),
    [(200, 16, 400), *(pytest.param(*of, marks=pytest.mark.nightly) for of in ((150, 16, 0), (3200, 1, 400)))],
)
@pytest.mark.parametrize("policy", ["off", "uniform"])
def test_if_the_kv_cache_is_full_the_result_is_close(policy: str, kv_blocks: int, size: int, prompt: int) -> None:
    assert median(errors(policy, 4, kv_blocks, size, prompt)) < 0.04


@pytest.mark.parametrize("policy", RECENT)
def test_the_deadline_of_earlier_groups_shortens_some_worlds_and_not_others(policy: str) -> None:
    bounded = []
    for seed in range(1, 80, 2):
        case = world(policy, seed, replicas=1, room=1000, groups=13)
        plan = replace(case.plan, needed_groups=None)
        shaping = case.plan.shaping
        assert shaping is not None
        assert shaping.deadline is not None
        alone = replace(plan, shaping=replace(shaping, deadline=replace(shaping.deadline, recent=None)))
        with_recent, without = (simulate(case.batch, each, case.machine) for each in (plan, alone))
        assert with_recent.seconds <= without.seconds * (1 + 1e-9)
        bounded.append(with_recent.seconds < 0.9 * without.seconds)
    assert 5 < sum(bounded) < 35


@pytest.mark.parametrize("policy", ["darts_cut", "cap"])
def test_there_is_no_deadline_if_all_groups_are_truncated(policy: str) -> None:
    case = world(policy, 1, replicas=1, room=1000, groups=10)
    lengths = np.full_like(case.batch.lengths, case.batch.max_tokens)
    case = World(replace(case.batch, lengths=lengths), replace(case.plan, needed_groups=None), case.machine)
    found = simulate(case.batch, case.plan, case.machine)
    assert_same(found, token_by_token(case))
    assert found.deadline is None
    assert found.truncated.sum() == 10 * case.plan.size


# --- computed by hand ---------------------------------------------------------


def test_a_step_costs_its_decode_its_context_and_its_prefill() -> None:
    times = StepTime(LatencyCurve((1.0, 2.0), (1.0, 3.0)), per_context_token=0.1, per_prefill_token=0.01)
    found = simulate(batch([[2, 4]], prompt=20), BatchPlan(2, [2]), Machine(times))
    # Step 1 prefills 20 tokens, and the 4 of the second candidate that are not in a full block of the first's.
    first = 3.0 + 0.1 * 40 + 0.01 * 24
    _, ended_at = found.start_and_end_seconds()
    assert ended_at.tolist()[0] == pytest.approx(
        [first + 3.0 + 0.1 * 42, first + 7.2 + (1.0 + 0.1 * 22) + (1.0 + 0.1 * 23)]
    )
    assert found.busy_share == pytest.approx((2 * (first + 7.2) + 6.5) / (2 * found.seconds))


def test_the_current_step_counts_as_done() -> None:
    clocks = simulate(batch([[2]]), BatchPlan(1, [1]), Machine(SECOND)).clocks
    steps = [clocks.steps_begun_at(seconds).tolist() for seconds in (0.0, 0.5, 1.0, 1.5, 9.0)]
    assert steps == [[0], [1], [1], [2], [2]]


def test_each_candidate_that_starts_in_a_step_makes_the_step_longer() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_start=0.5)
    found = simulate(batch([[5, 2], [3, 4]]), BatchPlan(2, [2, 2]), Machine(times, max_num_seqs=2))
    # Two start at once, the third when the second ends after two steps, the fourth when the others end after five.
    started_at, _ = found.start_and_end_seconds()
    assert started_at.tolist() == [[0, 0], [2 + 1.0, 5 + 1.5]]
    assert found.seconds == 9 + 4 * 0.5


def test_the_sequence_admitted_last_is_preempted_and_prefilled_again() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_prefill_token=0.5)
    # Two prompts of 3 tokens: after 2 steps there are 10 tokens, and the third step makes 12.
    machine = Machine(times, kv_blocks=10, block_size=1)
    found = simulate(batch([[6], [6]], prompt=3), BatchPlan(1, [1, 1]), machine)
    # Both prefill in step 1. After 3 tokens the second gives way; the first goes on alone to its 6th; then the second
    # prefills 3 + 3 tokens, and needs 3 more steps.
    assert found.completed_at.tolist() == pytest.approx([3 + 6, 9 + 3 + 3])


def test_a_sequence_that_is_too_large_for_the_kv_cache_runs_alone() -> None:
    found = simulate(batch([[30], [2]], prompt=10), BatchPlan(1, [1, 1]), Machine(SECOND, kv_blocks=2, block_size=1))
    assert found.completed_at.tolist() == [30, 32]


def test_a_long_prompt_is_in_the_kv_cache_once_for_all_its_candidates() -> None:
    machine = Machine(SECOND, kv_blocks=500, block_size=1)
    assert simulate(batch([[9] * 4], prompt=400), BatchPlan(4, [4]), machine).seconds == 9
    assert simulate(batch([[9]] * 4, prompt=400), BatchPlan(1, [1] * 4), machine).seconds == 36


def test_completion_lengths_are_in_order_and_0_for_a_group_that_was_cut_without_one() -> None:
    lengths = [[9, 9], [7, 7], *[[8, 8]] * 7, [900, 900], [900, 900]]
    plan = BatchPlan(2, [2] * 11, NAMED["cap"])
    found = simulate(batch(lengths), plan, Machine(SECOND))
    assert (found.deadline, found.completion_lengths) == (9, (7, *[8] * 7, 9, 0, 0))
    found = simulate(batch(lengths), replace(plan, needed_groups=2), Machine(SECOND))
    assert found.completion_lengths == (7, 8)


def test_a_rollout_that_has_enough_groups_stops_all_other_groups() -> None:
    found = simulate(batch([[5, 2], [30, 4], [6, 1]]), BatchPlan(2, [2, 2, 2], needed_groups=2), Machine(SECOND))
    assert (found.seconds, found.generated.tolist()) == (6, [[5, 2], [6, 4], [6, 1]])
    assert found.completed_at.tolist() == [5, float("inf"), 6]
    assert returned(found) == [(0, 0, 5, False), (0, 1, 2, False), (2, 0, 6, False), (2, 1, 1, False)]


def test_candidates_of_earlier_rollouts_continue() -> None:
    times = StepTime(LatencyCurve((1.0,), (1.0,)), per_prefill_token=0.5)
    going_on = replace(batch([[5, 20]], prompt=2), carried_tokens=np.asarray([[4, 0]]))
    found = simulate(going_on, BatchPlan(2, [2]), Machine(times))
    assert found.generated.tolist() == [[1, 20]]
    assert found.lengths.tolist() == [5, 20]
    assert found.seconds == 20 + 0.5 * (2 + 4 + 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_candidates_that_earlier_rollouts_finished_need_no_engine(replicas: int) -> None:
    first = replace(batch([[5, 9], [4, 4]], prompt=2), carried_tokens=np.asarray([[5, 0], [4, 4]]))
    found = simulate(first, BatchPlan(2, [2, 2]), Machine(SECOND, replicas=replicas))
    assert found.generated.tolist() == [[0, 9], [0, 0]]
    assert found.completed_at.tolist() == [9, 0]
    assert found.returned.tolist() == [[5, 9], [4, 4]]


def test_a_deadline_counts_all_tokens_of_a_candidate_that_continues() -> None:
    """Groups that need 4 tokens. One candidate of the fourth group has 6 tokens already, and would get 94 more."""
    lengths = [[3, 4], [3, 4], [3, 4], [4, 100]] * 2
    done = np.zeros((8, 2), dtype=np.int64)
    done[3, 1] = done[7, 1] = 6
    first = replace(batch(lengths), carried_tokens=done)
    cap = build_policies(Shaping(redundancy=2.0), Deadline(exploration=0.0))["cap"]
    found = simulate(first, BatchPlan(2, [2] * 8, cap), Machine(SECOND))
    assert found.returned[3, 1] == found.deadline == 4
    assert found.generated[3, 1] <= 4, "until the deadline is known"
    assert found.truncated[3, 1]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_deadline_is_known_although_first_candidates_ended_in_earlier_rollouts(order: list[int]) -> None:
    """Two groups of eight continue. One of their candidates is complete, and the other has 3 tokens more."""
    lengths = np.asarray([[3, 6], [3, 6]] + [[3, 4]] * 5 + [[4, 100]])
    done = np.zeros((8, 2), dtype=np.int64)
    done[:2] = 3
    drawn = batch(lengths.tolist())
    ordered = replace(
        drawn, lengths=lengths[:, order], tail_draws=drawn.tail_draws[:, order], carried_tokens=done[:, order]
    )
    cap = build_policies(Shaping(redundancy=2.0), Deadline(exploration=0.0))["cap"]
    found = simulate(ordered, BatchPlan(2, [2] * 8, cap), Machine(SECOND))
    assert found.deadline is not None
    assert found.seconds < 20


def test_rules_return_the_longest_candidates_or_none_or_a_sample() -> None:
    """Two of three candidates, with lengths 1, 2 and 3."""
    lengths = batch([[2, 3, 1]])
    longest = simulate(lengths, BatchPlan(2, [3], Shaping(tail=Tail.LONGEST)), Machine(SECOND))
    assert (returned(longest), longest.seconds) == ([(0, 1, 3, False), (0, 2, 1, False)], 3)
    shortest = simulate(lengths, BatchPlan(2, [3], Shaping(num_longest=0)), Machine(SECOND))
    assert (returned(shortest), shortest.seconds) == ([(0, 0, 2, False), (0, 2, 1, False)], 2)
    sampled = simulate(lengths, BatchPlan(2, [3], NAMED["uniform"]), Machine(SECOND))
    assert (returned(sampled), sampled.seconds) == ([(0, 0, 2, False), (0, 2, 1, False)], 2), "it has the lowest draw"


def test_a_plan_has_the_candidates_of_its_policy() -> None:
    stds = [10.0, 20.0, 400.0]
    assert BatchPlan.of(None, 8, stds) == BatchPlan(8, [8, 8, 8])
    assert BatchPlan.of(NAMED["uniform"], 8, stds).candidates == [12, 12, 12]
    adaptive = BatchPlan.of(NAMED["darts"], 8, stds)
    assert sum(adaptive.candidates) == 36
    assert adaptive.candidates[2] == 16
    assert adaptive.saturated == [False, False, True]


def test_groups_go_to_the_engine_with_the_fewest_candidates() -> None:
    assert place_groups([4, 2, 1, 3, 1], 2).tolist() == [0, 1, 1, 1, 0]


def test_training_takes_time_for_each_token_and_for_the_synchronisation_of_weights() -> None:
    assert Machine(SECOND, training_per_token=0.5, between_rollouts=3).training_seconds(10) == 8
