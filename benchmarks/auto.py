"""What `auto` brings in simulation, from nothing, against the best of its options in hindsight.

Usage: ``python -m benchmarks.auto [--changed] [PRESET | PRESET=TRACE ...]``, a trace on the machine of a preset. Prints
a table: step speed-up against ``off``, and of the later batches by how much returned trajectories are shorter and which
share of them is cut. All rules are allowed; ``--allow uniform,darts`` allows some. Each prompt has an earlier group
that is known; with ``--new-prompts`` none has. ``--changed`` runs each with changed lengths, too. A line takes about a
minute.

With ``--carry`` it is `auto` as it is by default: prompts go on in the next step from what they have, and it says how
many run ahead. The best option is then a number that is the same for all steps, and the share of stale tokens is shown.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.auto.options import RULES, Auto, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.forecast import limit_of
from darts_server.simulation.policies import Policy, parse_policy
from darts_server.simulation.presets import PRESETS
from darts_server.simulation.training import LEARNING, WARM_UP, AutoRun, Candidates, Step, run_policy, run_step
from darts_server.simulation.workload import Format, TracedWorkload, Workload, read_traces

DEFAULT = ("dapo-32b", "deepcoder-14b-16k", "search-r1-7b", "paper-h20-14b", "paper-h20-32b", "h200-8b", "tiny")
SIZE = 8
AGO = 8
"""Steps between a prompt's earlier group and the one that is measured, where lengths change from step to step."""
RARE, LONGER = 12, 10.0
"""One prompt of so many needs so many times as many tokens, in a changed workload."""

MOST_STALE = AutoLimits().most_stale
AHEAD = ("off", "off,order=long", *(f"off,start={start},carry=resume,order=long" for start in (1.1, 1.25, 1.5)))
"""What changes no distribution, and starts as many prompts in all steps."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def with_tail(lengths: Floats, median: float, power: float) -> Floats:
    """Return lengths whose ratio to the median is raised to a power."""
    return np.asarray(median * (lengths / median) ** power)


Change = Callable[[Floats, float, int, int], Floats]
"""From lengths of a prompt's candidates, their median, the prompt's number and its step to other lengths."""
CHANGES: dict[str, Change] = {
    "half as long": lambda lengths, *_: 0.5 * lengths,
    "twice as long": lambda lengths, *_: 2 * lengths,
    "thicker tail": lambda lengths, median, *_: np.maximum(lengths, with_tail(lengths, median, 1.5)),
    "thinner tail": lambda lengths, median, *_: np.minimum(lengths, with_tail(lengths, median, 0.5)),
    "few long prompts": lambda lengths, _, number, __: lengths * (1.0 if number % RARE else LONGER),
    "longer from step to step": lambda lengths, _, __, step: 1.04**step * lengths,
    "shorter from step to step": lambda lengths, _, __, step: 0.96**step * lengths,
    "less spread from step to step": lambda lengths, median, _, step: with_tail(
        lengths, median, max(1 - 0.04 * step, 0.4)
    ),
}


@dataclass(frozen=True)
class Changed:
    """A workload with other lengths. What was truncated, and what becomes too long, is truncated."""

    workload: Workload
    change: Change
    prompts: int  # of a step

    @property
    def max_tokens(self) -> int:
        return self.workload.max_tokens

    def prompt_tokens(self, number: int) -> int:
        return self.workload.prompt_tokens(number)

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        typical = self.workload.lengths(number, SIZE, np.random.default_rng(number), attempt=1)
        lengths = self.workload.lengths(number, count, rng, attempt)
        step = max(0, number // self.prompts - (AGO if attempt else 0))
        changed = np.ceil(self.change(lengths.astype(np.float64), float(np.median(typical)), number, step))
        is_truncated = lengths >= self.max_tokens
        return np.where(is_truncated, self.max_tokens, np.clip(changed, 1, self.max_tokens)).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=6, help="batches after the first 20 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="of a batch (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and draws (default: %(default)s)")
    parser.add_argument("--changed", action="store_true", help="with changed lengths, too")
    parser.add_argument("--allow", default=",".join(RULES), metavar="RULES", help="besides off (default: %(default)s)")
    parser.add_argument("--new-prompts", action="store_true", help="no prompt was seen before")
    parser.add_argument("--carry", action="store_true", help="auto as it is by default, with prompts carried over")
    parser.add_argument("--format", type=Format, choices=list(Format), default=Format.JSONL, help="of traces")
    options = parser.parse_args()
    allowed = tuple(rule for rule in options.allow.split(",") if rule)
    auto = build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=allowed))
    columns = "auto  best  share  shorter stale" if options.carry else "first 20  later  best  share  shorter   cut"
    print(f"{'lengths':<42} {columns}  best option")
    shares = []
    for text in options.workloads:
        for change in (None, *(CHANGES if options.changed else ())):
            line, share = measure(text, change, auto, options)
            shares.append(share)
            label = text.rpartition("/")[2] if change is None else f"  {change}"
            print(f"{label:<42} {line}", flush=True)
    print(f"smallest share: {min(shares):.2f}")


def measure(text: str, change: str | None, auto: Auto, options: argparse.Namespace) -> tuple[str, float]:
    """Return a line of the table, and the share of the best option's speed-up."""
    name, _, trace = text.partition("=")
    preset = PRESETS[name]
    workload: Workload = preset.workload
    if trace:
        workload = TracedWorkload(*read_traces([Path(trace)], options.format), seed=options.seed)
    prompts = options.prompts or preset.prompts
    if change is not None:
        workload = Changed(workload, CHANGES[change], prompts)
    numbers, seen = range(LEARNING + options.steps), (not options.new_prompts, options.seed)
    most, steps = auto.max_candidates(SIZE), options.steps if options.carry else len(numbers)
    candidates = Candidates(workload, preset.machine, SIZE, prompts, steps, most, *seen)
    if options.carry:
        return measure_carried(candidates)
    run = AutoRun(auto, candidates)
    chosen = [run.run(candidates.step_prompts(number))[1] for number in numbers]
    off = [run_step(Policy("off"), candidates.step_prompts(number), None, candidates) for number in numbers]
    unshaped, usual = seconds(off), mean_length(off[LEARNING:])
    found = {"off": 1.0}
    for option in auto.options[1:]:
        if option.cut_share is not None:  # its limit is known in hindsight: that of the lengths under `off`
            option = option.at(limit_of(option.cut_share, [step.batch for step in off[LEARNING:]]))
        policy, later = Policy(option.name, option.shaping), numbers[LEARNING:]
        fixed = [run_step(policy, candidates.step_prompts(number), None, candidates) for number in later]
        bias = 1 - mean_length(fixed) / usual
        if bias <= auto.limits.most_bias and cut_share(fixed) <= auto.limits.most_lost:
            found[option.name] = float(unshaped[LEARNING:].mean() / seconds(fixed).mean())
    best = max(found, key=lambda option: found[option])
    first = unshaped[:LEARNING].mean() / seconds(chosen[:LEARNING]).mean()
    now = unshaped[LEARNING:].mean() / seconds(chosen[LEARNING:]).mean()
    shorter, cut = 1 - mean_length(chosen[LEARNING:]) / usual, cut_share(chosen[LEARNING:])
    share = float(now / found[best])
    return f"{first:8.2f}  {now:5.2f}  {found[best]:4.2f}  {share:5.2f}  {shorter:7.0%}  {cut:4.0%}  {best}", share


def measure_carried(candidates: Candidates) -> tuple[str, float]:
    """Return the line and the share of `auto` by default, where prompts are carried over, in the same steps as all.

    The best option is one with as few stale tokens as `auto` may have.
    """
    longer = replace(candidates, steps=LEARNING - WARM_UP + candidates.steps)
    runs = {text: run_policy(parse_policy(text, SIZE), longer)[-candidates.steps :] for text in AHEAD}
    auto = run_policy(parse_policy("auto", SIZE), candidates)
    off = seconds(runs["off"]).mean()
    speeds = {text: off / seconds(steps).mean() for text, steps in runs.items() if stale(steps) <= MOST_STALE}
    best, now = max(speeds, key=lambda text: speeds[text]), off / seconds(auto).mean()
    shorter, share = 1 - mean_length(auto) / mean_length(runs["off"]), float(now / speeds[best])
    return f"{now:4.2f}  {speeds[best]:4.2f}  {share:5.2f}  {shorter:7.0%}  {stale(auto):4.0%}  {best}", share


def stale(steps: list[Step]) -> float:
    """Share of returned tokens that an earlier step has generated."""
    return sum(step.stale_tokens for step in steps) / sum(float(step.rollout.returned.sum()) for step in steps)


def seconds(steps: list[Step]) -> np.ndarray:
    return np.asarray([step.seconds for step in steps])


def mean_length(steps: list[Step]) -> float:
    return float(np.concatenate([step.rollout.lengths for step in steps]).mean())


def cut_share(steps: list[Step]) -> float:
    """Share that is cut of the returned trajectories that would have ended."""
    shares = []
    for step in steps:
        would_end = (step.rollout.returned > 0) & step.batch.valid
        shares.append((step.rollout.returned < step.batch.ends)[would_end])
    return float(np.concatenate(shares).mean())


if __name__ == "__main__":
    main()
