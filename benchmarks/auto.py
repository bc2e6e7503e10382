"""What `auto` brings in simulation, from nothing, against the best of its options in hindsight.

Usage: ``python -m benchmarks.auto [PRESET | PRESET=TRACE.jsonl ...]``, a trace on the machine of a preset. Prints a
table: step speed-up against ``off``. A preset takes about a minute.
"""

import argparse
from pathlib import Path

import numpy as np

from darts_server.policy.auto.options import RULES, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.simulation.auto import LEARNING, AutoRun
from darts_server.simulation.policies import Policy
from darts_server.simulation.presets import PRESETS
from darts_server.simulation.traces import Format, read_traces
from darts_server.simulation.training import Candidates, Setting, Step, run_step
from darts_server.simulation.workload import TracedWorkload, Workload

DEFAULT = ("dapo-32b", "deepcoder-14b-16k", "search-r1-7b", "h200-8b", "tiny")
AUTO = build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=RULES))
SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=6, help="batches after the first 20 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="of a batch (default: the preset's)")
    options = parser.parse_args()
    print(f"{'lengths':<24} first 20  later  best  share  best option")
    for text in options.workloads:
        print(f"{text:<24} {measure(text, options.steps, options.prompts)}", flush=True)


def measure(text: str, steps: int, prompts: int | None) -> str:
    """Return a line of the table."""
    name, _, trace = text.partition("=")
    preset = PRESETS[name]
    workload: Workload = preset.workload
    if trace:
        workload = TracedWorkload(*read_traces([Path(trace)], Format.JSONL), seed=0)
    setting = Setting(preset.machine, SIZE, prompts or preset.prompts, LEARNING + steps)
    candidates = Candidates(workload, setting, AUTO.max_candidates(SIZE))
    run = AutoRun(AUTO, candidates, setting)
    auto = seconds([run.run(candidates.step_prompts(number))[1] for number in range(setting.steps)])
    later = range(LEARNING, setting.steps)
    off = run_fixed(Policy("off"), range(setting.steps), candidates, setting)
    unshaped, usual = seconds(off), mean_length(off[LEARNING:])
    found = {"off": 1.0}
    for option in AUTO.options[1:]:
        fixed = run_fixed(Policy(option.name, option.shaping), later, candidates, setting)
        bias = 1 - mean_length(fixed) / usual
        if bias <= AUTO.limits.most_bias and cut_share(fixed) <= AUTO.limits.most_lost:
            found[option.name] = float(unshaped[LEARNING:].mean() / seconds(fixed).mean())
    best = max(found, key=lambda option: found[option])
    first = unshaped[:LEARNING].mean() / auto[:LEARNING].mean()
    now = unshaped[LEARNING:].mean() / auto[LEARNING:].mean()
    return f"{first:8.2f}  {now:5.2f}  {found[best]:4.2f}  {now / found[best]:5.2f}  {best}"


def run_fixed(policy: Policy, numbers: range, candidates: Candidates, setting: Setting) -> list[Step]:
    return [run_step(policy, candidates.step_prompts(number), None, candidates, setting) for number in numbers]


def seconds(steps: list[Step]) -> np.ndarray:
    return np.asarray([step.seconds for step in steps])


def mean_length(steps: list[Step]) -> float:
    return float(np.mean([one.tokens for step in steps for one in step.rollout.returned]))


def cut_share(steps: list[Step]) -> float:
    """Share of the returned trajectories that are cut although they would have ended."""
    return float(
        np.mean(
            [
                one.tokens < step.batch.ends[one.group, one.index] and step.batch.valid[one.group, one.index]
                for step in steps
                for one in step.rollout.returned
            ]
        )
    )


if __name__ == "__main__":
    main()
