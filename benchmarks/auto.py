"""How fast `auto` is in simulation, from nothing, against the best number of prompts ahead in hindsight.

Usage: ``python -m benchmarks.auto [--changed] [PRESET | PRESET=TRACE ...]``, a trace on the machine of a preset.
Prompts that are left over go on in the next step. Prints a table of the steps after the first 20: speed-up against
``off``, the speed-up of the best number of prompts that is the same in all steps, with as few stale tokens as `auto`
may have, and by how much returned trajectories are shorter. Each prompt has an earlier group that is known; with
``--new-prompts`` none has. ``--changed`` runs each workload with changed lengths, too. A line takes some seconds.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from darts_server.offline.simulation.policies import parse_policy
from darts_server.offline.simulation.presets import PRESETS
from darts_server.offline.simulation.training import LEARNING, WARM_UP, Candidates, Step, run_policy
from darts_server.offline.simulation.workload import Format, TracedWorkload, Workload, read_traces
from darts_server.policy.auto import AutoLimits

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
    parser.add_argument("--steps", type=int, default=24, help="batches after the first 20 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="of a batch (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and draws (default: %(default)s)")
    parser.add_argument("--changed", action="store_true", help="with changed lengths, too")
    parser.add_argument("--new-prompts", action="store_true", help="no prompt was seen before")
    parser.add_argument("--format", type=Format, choices=list(Format), default=Format.JSONL, help="of traces")
    options = parser.parse_args()
    print(f"{'lengths':<42} auto  best  share  shorter stale  best option")
    shares = []
    for text in options.workloads:
        for change in (None, *(CHANGES if options.changed else ())):
            line, share = measure(text, change, options)
            shares.append(share)
            label = text.rpartition("/")[2] if change is None else f"  {change}"
            print(f"{label:<42} {line}", flush=True)
    print(f"smallest share: {min(shares):.2f}")


def measure(text: str, change: str | None, options: argparse.Namespace) -> tuple[str, float]:
    """Return a line of the table, and the share of the best option's speed-up."""
    name, _, trace = text.partition("=")
    preset = PRESETS[name]
    workload: Workload = preset.workload
    if trace:
        workload = TracedWorkload(*read_traces([Path(trace)], options.format), seed=options.seed)
    prompts = options.prompts or preset.prompts
    if change is not None:
        workload = Changed(workload, CHANGES[change], prompts)
    known = not options.new_prompts
    # As many candidates are drawn as by `darts-server simulate`.
    candidates = Candidates(workload, preset.machine, SIZE, prompts, options.steps, 2 * SIZE, known, options.seed)
    longer = replace(candidates, steps=LEARNING - WARM_UP + candidates.steps)
    runs = {option: run_policy(parse_policy(option, SIZE), longer)[-candidates.steps :] for option in AHEAD}
    auto = run_policy(parse_policy("auto", SIZE), candidates)
    off = seconds(runs["off"]).mean()
    speeds = {option: off / seconds(steps).mean() for option, steps in runs.items() if stale(steps) <= MOST_STALE}
    best = max(speeds, key=lambda option: speeds[option])
    now = off / seconds(auto).mean()
    shorter = 1 - mean_length(auto) / mean_length(runs["off"])
    share = float(now / speeds[best])
    return f"{now:4.2f}  {speeds[best]:4.2f}  {share:5.2f}  {shorter:7.0%}  {stale(auto):4.0%}  {best}", share


def stale(steps: list[Step]) -> float:
    """Share of returned tokens that an earlier step has generated."""
    return sum(step.stale_tokens for step in steps) / sum(float(step.rollout.returned.sum()) for step in steps)


def seconds(steps: list[Step]) -> np.ndarray:
    return np.asarray([step.seconds for step in steps])


def mean_length(steps: list[Step]) -> float:
    return float(np.concatenate([step.rollout.lengths for step in steps]).mean())


if __name__ == "__main__":
    main()
