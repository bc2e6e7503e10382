"""Steps of training under policies and baselines: what must hold between them."""

from dataclasses import replace

import numpy as np
import pytest

from darts_server.offline.simulation.baselines import simulate_baselines
from darts_server.offline.simulation.model.batch import Ints
from darts_server.offline.simulation.policies import parse_policy
from darts_server.offline.simulation.presets import PRESETS, TINY_MACHINE
from darts_server.offline.simulation.summary import relative_to, summarise
from darts_server.offline.simulation.training import (
    LEARNING,
    WARM_UP,
    Candidates,
    Prompt,
    measure_outcome,
    run_policy,
    run_step,
)
from darts_server.offline.simulation.workload import Workload
from darts_server.policy.deadline import RecentCompletionLengths


def candidates(prompts: int = 12, steps: int = 2, *, knows_prompts: bool = True) -> Candidates:
    return Candidates(PRESETS["tiny"].workload, TINY_MACHINE, 4, prompts, steps, 8, knows_prompts)


def test_all_policies_get_the_same_candidates() -> None:
    drawn = candidates()
    off, uniform = (run_policy(parse_policy(text, 4), drawn) for text in ("off", "uniform"))
    for one, other in zip(off, uniform, strict=True):
        assert one.batch.lengths.tolist() == other.batch.lengths[:, :4].tolist()
        assert one.batch.prompt_tokens.tolist() == other.batch.prompt_tokens.tolist()
        assert other.rollout.generated.shape == (12, 6)


def test_prompts_that_were_not_complete_start_again_in_the_next_step() -> None:
    steps = run_policy(parse_policy("off,start=1.5", 4), candidates())
    assert [np.isfinite(step.rollout.completed_at).sum() for step in steps] == [12, 12]
    left = steps[0].batch.prompt_tokens[np.isinf(steps[0].rollout.completed_at)]
    assert steps[1].batch.prompt_tokens[:6].tolist() == left.tolist()


def test_a_long_round_has_the_left_over_prompts_and_waits_for_all_of_them() -> None:
    # Of 18 prompts 6 are left over, so each third step is a long round of 12; the warm-up is a cycle too.
    steps = run_policy(parse_policy("off,start=1.5,rounds=long", 4), candidates())
    assert [len(step.batch.lengths) for step in steps] == [18, 18, 12]
    assert [np.isfinite(step.rollout.completed_at).sum() for step in steps] == [12, 12, 12]
    left = [step.batch.prompt_tokens[np.isinf(step.rollout.completed_at)].tolist() for step in steps]
    assert steps[2].batch.prompt_tokens.tolist() == left[0] + left[1]
    off = summarise("off", run_policy(parse_policy("off", 4), candidates()), 4)
    assert 0.5 < relative_to(off, summarise("long", steps, 4))["tokens_returned"] < 1.5, "tokens of a step, not of all"


def test_prompts_that_were_set_aside_for_too_long_start_again() -> None:
    """With 13 of 12 prompts a long round comes in each 13th step. Prompts continue in at most 4 steps."""
    steps = run_policy(parse_policy("off,start=1.1,rounds=long,carry=resume", 4), candidates())
    [long_round] = [step for step in steps if len(step.batch.lengths) == 12]
    carried = long_round.batch.carried_tokens
    assert carried is not None
    assert 0 < carried.any(axis=1).sum() <= 4


@pytest.mark.parametrize("policy", ["off", "cap", "uniform"])
def test_prompts_that_continue_generate_no_token_twice(policy: str) -> None:
    steps = run_policy(parse_policy(f"{policy},start=1.5,carry=resume", 4), candidates())
    first, second = steps[:2]
    left = np.flatnonzero(np.isinf(first.rollout.completed_at))
    before = 0 if first.batch.carried_tokens is None else first.batch.carried_tokens[left]
    assert second.batch.carried_tokens is not None
    assert second.batch.carried_tokens[: len(left)].tolist() == (first.rollout.generated[left] + before).tolist()
    returned = second.rollout.returned > 0
    tokens = second.batch.carried_tokens + second.rollout.generated
    assert (second.rollout.returned[returned] <= tokens[returned]).all()
    assert second.batch.lengths[: len(left)].tolist() == first.batch.lengths[left].tolist()
    assert summarise("partial", steps, 4)["stale_share"] > 0


def test_a_limit_in_hindsight_truncates_its_share() -> None:
    drawn = candidates(prompts=100, steps=1)
    off = run_policy(parse_policy("off", 4), drawn)
    anyway = summarise("off", off, 4)["truncated_share"] or 0.0
    two, ten, *_ = simulate_baselines(off, drawn)
    assert two["truncated_share"] == pytest.approx(anyway + 0.02, abs=0.01)
    assert ten["truncated_share"] == pytest.approx(anyway + 0.1, abs=0.02)
    assert two["rollout_seconds"] > ten["rollout_seconds"]


def test_one_step_off_divides_the_engines_and_waits_for_the_slower_part() -> None:
    preset = PRESETS["search-r1-7b"]
    drawn = Candidates(preset.workload, preset.machine, size=4, prompts=40, steps=1, most=8)
    off = run_policy(parse_policy("off", 4), drawn)
    found = {summary["policy"]: summary for summary in simulate_baselines(off, drawn)}["async one-step-off"]
    between = preset.machine.between_rollouts
    slower = max(found["rollout_seconds"], found["training_seconds"] - between)
    assert found["step_seconds"] == pytest.approx(slower + between)
    assert found["stale_share"] == 1


def test_the_effective_sample_size_of_unshaped_groups_is_1() -> None:
    drawn = candidates()
    off = summarise("off", run_policy(parse_policy("off", 4), drawn), 4)
    assert relative_to(off, off)["step_speedup"] == relative_to(off, off)["tokens_generated"] == 1
    assert off["effective_sample_size"] == 1
    uniform = summarise("uniform", run_policy(parse_policy("uniform", 4), drawn), 4)
    assert uniform["effective_sample_size"] == pytest.approx((3 + 3) ** 2 / (3 + 9) / 4)
    shortest = summarise("shortest", run_policy(parse_policy("uniform,longest=0", 4), drawn), 4)
    assert shortest["effective_sample_size"] is None


def test_long_prompts_can_come_first() -> None:
    drawn = candidates()
    given, ordered = (run_policy(parse_policy(text, 4), drawn) for text in ("off", "off,order=long"))
    for one, other in zip(given, ordered, strict=True):
        assert sorted(one.batch.lengths.tolist()) == sorted(other.batch.lengths.tolist())
    first_step = [Prompt(number) for number in range(12)]
    numbers = [prompt.number for prompt in drawn.in_server_order(first_step)]
    means = [earlier.mean_ema for number in numbers if (earlier := drawn.earlier_stats(number)) is not None]
    assert means == sorted(means, reverse=True)
    new = candidates(steps=1, knows_prompts=False)
    assert new.in_server_order(first_step) == first_step
    deferring = run_policy(parse_policy("off,start=1.5,order=long", 4), drawn)
    assert [np.isfinite(step.rollout.completed_at).sum() for step in deferring] == [12, 12]


class RunawaysAfterTheFirstStep:
    """Each second prompt runs away, but for those of the first step."""

    max_tokens = 10_000

    def prompt_tokens(self, number: int) -> int:
        return 10

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        runs_away = number >= 3 * 12 and number % 2
        return np.full(count, self.max_tokens if runs_away else 100)


class NearlyAllTruncated:
    """Nine of ten trajectories reach the limit."""

    max_tokens = 96

    def prompt_tokens(self, number: int) -> int:
        return 10

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        return np.where(rng.random(count) < 0.9, self.max_tokens, rng.integers(20, self.max_tokens, count))


def test_auto_runs_nothing_ahead_if_nearly_all_trajectories_are_truncated() -> None:
    for machine in (TINY_MACHINE, PRESETS["dapo-32b"].machine):
        drawn = Candidates(NearlyAllTruncated(), machine, 8, 32, 24, 8)
        steps = run_policy(parse_policy("auto", 8), drawn)
        assert [len(step.batch.lengths) for step in steps] == [32] * 24
        assert sum(step.stale_tokens for step in steps) == 0


def test_deadlines_are_remembered_from_step_to_step() -> None:
    drawn = Candidates(RunawaysAfterTheFirstStep(), TINY_MACHINE, 4, 12, 2, 4)
    first, second = (step.rollout for step in run_policy(parse_policy("cap", 4), drawn))
    assert (first.deadline, first.completion_lengths) == (100, (100,) * 12)
    assert second.deadline == 338, "1.5 to the third power times that of the first step"
    assert second.completion_lengths == (100,) * 6 + (0,) * 6
    second_step = [Prompt(number) for number in range(12 * (WARM_UP + 1), 12 * (WARM_UP + 2))]
    alone = run_step(parse_policy("cap", 4), second_step, None, drawn, RecentCompletionLengths()).rollout
    assert alone.seconds > 10 * second.seconds


# --- auto, from nothing --------------------------------------------------------

STEPS = 24


class EqualLengths:
    max_tokens = 1000

    def prompt_tokens(self, number: int) -> int:
        return 10

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        return np.full(count, 100)


def speed_up(workload: Workload) -> float:
    """Return how many times as fast the steps after the first twenty are under `auto` as the same ones under `off`."""
    auto = Candidates(workload, TINY_MACHINE, 8, 16, STEPS, 8)
    off = replace(auto, steps=LEARNING - WARM_UP + STEPS)
    seconds = [
        float(np.mean([step.seconds for step in run_policy(parse_policy(policy, 8), drawn)[-STEPS:]]))
        for policy, drawn in (("off", off), ("auto", auto))
    ]
    return seconds[0] / seconds[1]


def test_auto_is_faster_than_off_if_a_few_answers_are_long() -> None:
    assert speed_up(PRESETS["tiny"].workload) > 1.1


def test_auto_is_as_fast_as_off_if_all_answers_end_together() -> None:
    """Also where they end at their length limit."""
    assert speed_up(EqualLengths()) > 0.99


def test_auto_runs_no_prompt_ahead_if_no_token_may_be_stale() -> None:
    steps = run_policy(parse_policy("auto,stale=0", 4), candidates())
    assert [(len(step.batch.lengths), step.stale_tokens) for step in steps] == [(12, 0)] * 2


def test_auto_learns_the_time_that_groups_take_with_drafts() -> None:
    times = replace(TINY_MACHINE.step_time, drafts=(0.7, 0.5, 0.3), per_prefill_token=0.0)
    machine = replace(TINY_MACHINE, step_time=times)
    [step] = run_policy(parse_policy("off", 4), replace(candidates(steps=1), machine=machine))
    outcome = measure_outcome(step, machine)
    assert max(outcome.alone) == pytest.approx(step.rollout.seconds, rel=0.02)
    [slower] = run_policy(parse_policy("off", 4), replace(candidates(steps=1)))
    assert step.rollout.seconds < 0.6 * slower.rollout.seconds
