"""`auto` over simulated batches, from nothing."""

from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.auto.options import RESTART, RULES, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.simulation.auto import AutoRun, run_auto
from darts_server.simulation.policies import Policy
from darts_server.simulation.presets import PRESETS, with_engines
from darts_server.simulation.training import LEARNING, Candidates, Setting, run_policy

AUTO = build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=RULES))
STEPS = 6


def small(preset: str, prompts: int, *, knows_prompts: bool = True) -> tuple[Candidates, Setting]:
    machine = with_engines(PRESETS[preset].machine, 1)
    setting = Setting(machine, size=8, prompts=prompts, steps=STEPS, knows_prompts=knows_prompts)
    return Candidates(PRESETS[preset].workload, setting, AUTO.max_candidates(8)), setting


def seconds(option: str, candidates: Candidates, setting: Setting) -> float:
    [shaping] = [each.shaping for each in AUTO.options if each.name == option]
    return float(np.mean([step.seconds for step in run_policy(Policy(option, shaping), candidates, setting)]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("preset", "prompts", "knows_prompts"),
    [("dapo-32b", 16, True), ("deepcoder-14b-16k", 32, True), ("tiny", 16, True), ("tiny", 16, False)],
)
def test_after_twenty_batches_it_is_as_fast_as_the_best_fixed_option_and_never_slower_than_off(
    preset: str, prompts: int, knows_prompts: bool
) -> None:
    candidates, setting = small(preset, prompts, knows_prompts=knows_prompts)
    steps, names = run_auto(AUTO, candidates, setting)
    found = float(np.mean([step.seconds for step in steps]))
    assert found <= seconds("off", candidates, setting) / 0.98
    for option in ("cap at 0.8", "cut 1.25 at 0.8", "cut 1.5 at 0.8", "uniform 1.5"):
        assert found <= seconds(option, candidates, setting) / 0.95, option
    if preset == "deepcoder-14b-16k":
        assert all(name.startswith(("off", "cap", "limit")) for name in names.split(", "))


def test_its_first_batch_is_that_of_off_and_counts_as_measured() -> None:
    candidates, setting = small("tiny", 16)
    run = AutoRun(AUTO, candidates, setting)
    choice, done = run.run(candidates.step_prompts(0))
    assert choice.option.name == "off"
    assert done.batch.lengths.shape == (16, 8)
    assert [one.name for one in run.state.measured] == ["off"]
    assert abs(run.state.measured[0].error) < 0.5
    assert len(run.state.training) == 1
    assert len(run.state.means) == 16
    choice, _ = run.run(candidates.step_prompts(1))
    assert choice.option.name != "off"


def test_groups_that_are_deferred_teach_it_nothing() -> None:
    candidates, setting = small("dapo-32b", 16, knows_prompts=False)
    run = AutoRun(AUTO, candidates, setting)
    _, done = run.run(candidates.step_prompts(0), num_groups=12)
    complete = np.isfinite(done.rollout.completed_at)
    assert complete.sum() == len(run.state.means) == 12

    known = AutoRun(AUTO, *small("dapo-32b", 16))
    known.run(candidates.step_prompts(0), num_groups=12)
    assert len(known.state.means) == 16, "with what is known of deferred prompts"


def test_it_ends_with_fewer_groups_where_that_takes_less_time_for_each() -> None:
    auto = build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=(RESTART,)))
    for preset, prompts, is_deferring in (("dapo-32b", 16, True), ("deepcoder-14b-16k", 32, False)):
        run = AutoRun(auto, *(of := small(preset, prompts)))
        steps = [run.run(of[0].step_prompts(number), min_groups=3 * prompts // 4) for number in range(STEPS)]
        choice, done = steps[-1]
        assert steps[0][0].enough is None
        assert (choice.enough is not None) is is_deferring, preset
        complete = np.isfinite(done.rollout.completed_at).sum()
        assert complete == (choice.enough or prompts)


def test_all_policies_are_measured_on_the_same_steps() -> None:
    candidates, setting = small("tiny", 8)
    none = replace(AUTO, options=AUTO.options[:1])
    steps, names = run_auto(none, candidates, setting)
    off = run_policy(Policy("off"), candidates, setting)
    assert names == "off"
    assert [step.seconds for step in steps] == [step.seconds for step in off]
    assert LEARNING >= STEPS
