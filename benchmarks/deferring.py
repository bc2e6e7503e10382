"""What it brings, in simulation, that `auto` chooses with how many complete groups a batch ends (``min_groups``).

Usage: ``python -m benchmarks.deferring [PRESET ...]``. Each batch starts the prompts that were deferred before, and new
ones up to the preset's number; what is deferred starts again with other candidates. Compared are seconds per group that
is returned, training included: as speed-up against ``off`` with all groups, over the batches after the first 20. "All"
waits for all groups, "fixed" always ends with ``--share`` of them (``num_groups``), and "chosen" may end with so many
(``min_groups``); once each with ``off`` alone, and once with the rules that `auto` has by default. "Shorter": by how
much what is returned is shorter than under ``off`` with all groups, which shows whether long prompts are deferred for
ever. "Oldest": most batches in which one prompt was deferred, of those that were returned or still wait.

What is still deferred at the end is not paid for, as what was deferred before the first of these batches is not left
out: the more batches, the less that counts.
"""

import argparse
from dataclasses import dataclass, field

import numpy as np

from darts_server.policy.auto.options import DEFER, Auto, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.simulation.auto import LEARNING, AutoRun
from darts_server.simulation.presets import PRESETS
from darts_server.simulation.training import Candidates, Prompt, Setting

DEFAULT = ("dapo-32b", "deepcoder-14b-16k", "search-r1-7b", "paper-h20-14b", "h200-8b", "tiny")
SIZE = 8
HEAD = ("preset", "rules", "groups", "speed-up", "shorter", "deferring", "oldest", "options")
ALL, FIXED, CHOSEN = "all", "fixed", "chosen"


@dataclass
class Totals:
    """Of the batches after the first `LEARNING`."""

    seconds: float = 0.0
    groups: int = 0
    trajectories: int = 0
    tokens: int = 0
    oldest: int = 0
    deferring: int = 0
    options: set[str] = field(default_factory=set)

    @property
    def per_group(self) -> float:
        return self.seconds / self.groups

    @property
    def mean_length(self) -> float:
        return self.tokens / self.trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=12, help="batches after the first 20 (default: %(default)s)")
    parser.add_argument("--prompts", type=int, help="of a batch (default: the preset's)")
    parser.add_argument("--share", type=float, default=0.8, help="of the groups, for the others (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and draws (default: %(default)s)")
    parser.add_argument("--new-prompts", action="store_true", help="no prompt was seen before")
    options = parser.parse_args()
    if not 0 < options.share < 1:
        parser.error("--share must be between 0 and 1")
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for name in options.presets:
        base: Totals | None = None
        for rules in ((), tuple(rule for rule in AutoLimits().allow if rule != DEFER)):
            auto = build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=(*rules, DEFER)))
            for groups in (ALL, FIXED, CHOSEN):
                found = run(name, auto, groups, options)
                base = base or found
                shorter, speedup = 1 - found.mean_length / base.mean_length, base.per_group / found.per_group
                cells = [name, ", ".join(("off", *rules)), groups, f"{speedup:.2f}", f"{shorter:.0%}"]
                cells += [f"{found.deferring}/{options.steps}", str(found.oldest), ", ".join(sorted(found.options))]
                print(f"| {' | '.join(cells)} |", flush=True)


def run(preset: str, auto: Auto, groups: str, options: argparse.Namespace) -> Totals:
    """Run all batches from nothing."""
    workload, machine = PRESETS[preset].workload, PRESETS[preset].machine
    prompts, knows = options.prompts or PRESETS[preset].prompts, not options.new_prompts
    setting = Setting(machine, SIZE, prompts, LEARNING + options.steps, knows, options.seed)
    candidates = Candidates(workload, setting, auto.max_candidates(SIZE))
    least = round(options.share * prompts)
    ends: dict[str, int] = {ALL: {}, FIXED: {"num_groups": least}, CHOSEN: {"min_groups": least}}[groups]
    training = AutoRun(auto, candidates, setting)
    totals, deferred, new = Totals(), list[Prompt](), 0
    for number in range(setting.steps):
        more = prompts - len(deferred)
        batch = [*deferred, *(Prompt(each) for each in range(new, new + more))]
        new += more
        choice, step = training.run(batch, **ends)
        is_left = np.isinf(step.rollout.completed_at)
        deferred = [Prompt(batch[i].number, batch[i].attempt + 1) for i in np.flatnonzero(is_left)]
        if number >= LEARNING:
            totals.seconds += step.seconds
            totals.groups += len(batch) - len(deferred)
            totals.trajectories += len(step.rollout.returned)
            totals.tokens += sum(one.tokens for one in step.rollout.returned)
            totals.oldest = max([totals.oldest, *(prompt.attempt for prompt in (*batch, *deferred))])
            totals.deferring += bool(deferred)
            totals.options.add(choice.name)
    return totals


if __name__ == "__main__":
    main()
