"""Train the tiny task by GRPO under each policy, and compare what is learned and what it costs.

    python -m benchmarks.rl
    python -m benchmarks.rl --quick

For each start and seed all policies train in turns, step by step, on the same prompts in the same order. Before its
turn a run's weights are pushed and the server's state under its policy is restored. So other load on the machine
affects all of them alike, and none profits from what the server learned under another. They share one server, except
for the policies that prune by quality: each of these has its own, which goes on learning between turns. Evaluation is
unshaped, on other prompts, and not part of the time.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import trange

from benchmarks.rl_picture import picture
from benchmarks.rl_table import BASE, Runs, tables
from darts_client import Client
from darts_server.demo.problems import Difficulty
from darts_server.demo.server import DARTS, MODEL, serving
from darts_server.store import Store
from examples.tiny_rl import warm_start
from examples.tiny_rl.demonstrations import VARIANTS
from examples.tiny_rl.grpo import Learner
from examples.tiny_rl.remote import TIMEOUT_SECONDS
from examples.tiny_rl.train import Recipe, train
from examples.tiny_rl.train_log import Entry, read_log

_Policies = Mapping[str, Mapping[str, object]]

POLICIES: _Policies = {
    "off": {"name": "off"},
    "uniform": {"name": "uniform"},
    "darts": {"name": "darts"},
    "darts, longest tail": {"name": "darts", "tail": "longest"},
    "darts_deadline": {"name": "darts_deadline"},
    "darts_cut": {"name": "darts_cut"},
    "arrol": {"name": "arrol"},
    "darts+arrol": {"name": "darts+arrol"},
}
# The best of these with one setting changed; run only if they are named on the command line.
SETTINGS: _Policies = {
    "darts_cut, 1.25": {"name": "darts_cut", "redundancy": 1.25},
    "darts_cut, 2": {"name": "darts_cut", "redundancy": 2.0, "max_redundancy": 3.0},
    "darts_cut, q.75": {"name": "darts_cut", "deadline_quantile": 0.75},
    "darts_cut, L2": {"name": "darts_cut", "num_longest": 2},
}
ALL_POLICIES: _Policies = {**POLICIES, **SETTINGS}
# Answers have some 30 tokens and runs some 30 steps, so pruning begins earlier than for a large model.
PRUNING_FLAGS = ("--detect-at", "10", "--cold-steps", "4")
PRUNING = ("arrol", "darts+arrol")
# Demonstrations of the warm start, and difficulty of the training prompts. "deep" has only hard problems, where a rule
# that trades depth for speed would show.
STARTS: Mapping[str, Difficulty | None] = {"wordier": None, "standard": None, "deep": "hard"}
QUICK_POLICIES = ("off", "uniform", "darts_cut")
QUICK_STEPS, QUICK_SEEDS = 16, (0, 1)
QUICK = "Quick: one start, {seeds} seeds, {policies} and {steps} steps. Too few to conclude anything."


@dataclass(frozen=True)
class Plan:
    """The runs."""

    starts: Sequence[str]
    policies: Sequence[str]
    seeds: Sequence[int]
    recipe: Recipe


class Run:
    """The training run of one policy, a step at a time, on a server that it may share."""

    def __init__(self, client: Client, plan: Plan, start: str, policy: str, seed: int, out: Path) -> None:
        self._client = client
        self._learner = Learner(start_model(start, out))
        recipe = replace(plan.recipe, difficulty=STARTS[start])
        self._steps = train(client, ALL_POLICIES[policy], self._learner, recipe, seed)
        self._log = log_path(out, start, policy, seed)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._state = self._log.with_suffix(".state")
        self._state.write_bytes(Store().export())  # empty

    def step(self) -> None:
        """Run the next step, from where this run left off."""
        self._client.weights.push(self._learner.weights())
        self._client.state.load(self._state)
        entry = next(self._steps)
        self._client.state.save(self._state)
        with self._log.open("a") as log:
            print(entry.line(), file=log)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    plan = options.plan
    if not options.report:
        torch.set_num_threads(1)  # the server needs the other core
        with ExitStack() as stack:
            urls = start_servers(stack, plan.policies, options.out)
            for seed in plan.seeds:
                for start in plan.starts:
                    train_in_turns(urls, plan, start, seed, options.out)
    print(report(plan, options.out))
    if options.quick:
        print(QUICK.format(seeds=len(plan.seeds), policies=", ".join(plan.policies), steps=plan.recipe.steps))
    return 0


def start_servers(stack: ExitStack, policies: Sequence[str], out: Path) -> dict[str, str]:
    """Start the servers; return the address of each policy's."""
    shared = stack.enter_context(serving(DARTS, out / "server.log")).url
    own = {
        p: stack.enter_context(serving(DARTS, out / f"{p}.log", *PRUNING_FLAGS)).url for p in policies if p in PRUNING
    }
    return {policy: own.get(policy, shared) for policy in policies}


def train_in_turns(urls: Mapping[str, str], plan: Plan, start: str, seed: int, out: Path) -> None:
    """Train all policies from one start, with one seed, in turns."""
    with ExitStack() as stack:
        clients = {url: stack.enter_context(Client(url, timeout=TIMEOUT_SECONDS)) for url in urls.values()}
        runs = [Run(clients[urls[p]], plan, start, p, seed, out) for p in plan.policies]
        for turn in trange(plan.recipe.steps + 1, desc=f"{start}, seed {seed}", unit="step"):
            first = turn % len(runs)
            for run in runs[first:] + runs[:first]:
                run.step()


def start_model(start: str, out: Path) -> Path:
    """Return the model of a start; one that is not committed is trained once."""
    if start == "standard":
        return MODEL
    folder = out / "starts" / start
    if not (folder / "config.json").is_file():
        warm_start.save(warm_start.train(VARIANTS[start], warm_start.Recipe(), seed=0), folder)
    return folder


def report(plan: Plan, out: Path) -> str:
    """Draw the picture and format the tables, from all seeds whose runs are complete."""
    starts = {start: runs for start in plan.starts if (runs := read_runs(plan, start, out))[BASE]}
    if not starts:
        return f"no run in {out} is complete"
    picture(starts, out / "learning.png")
    return "\n\n".join([f"Picture: {out / 'learning.png'}", *(tables(start, runs) for start, runs in starts.items())])


def read_runs(plan: Plan, start: str, out: Path) -> Runs:
    """Read the seeds for which every policy has all steps; of longer runs, the first steps."""
    runs: dict[str, dict[int, list[Entry]]] = {policy: {} for policy in plan.policies}
    for seed in plan.seeds:
        logs = {policy: log_path(out, start, policy, seed) for policy in plan.policies}
        entries = {policy: read_log(log) if log.is_file() else [] for policy, log in logs.items()}
        if all(len(each) > plan.recipe.steps for each in entries.values()):
            for policy, each in entries.items():
                runs[policy][seed] = each[: plan.recipe.steps + 1]
    return runs


def log_path(out: Path, start: str, policy: str, seed: int) -> Path:
    return out / start / f"{policy.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.rl", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one start, three policies, two seeds, 16 steps: under ten minutes")
    add("--seeds", nargs="+", type=int, metavar="N", help="a run of each policy from each start (default: 0 1 2)")
    add("--steps", type=int, metavar="N", help="steps of each run (default: 30)")
    add("--starts", nargs="+", choices=list(STARTS), default=list(STARTS), help="starts (default: all)")
    names = f"policies, of: {'; '.join(ALL_POLICIES)} (default: the first {len(POLICIES)})"
    add("--policies", nargs="+", choices=list(ALL_POLICIES), default=list(POLICIES), metavar="NAME", help=names)
    add("--out", type=Path, metavar="FOLDER", help="for logs and models (default: out/rl, or out/rl-quick)")
    add("--report", action="store_true", help="run nothing; print the tables of the logs in --out")
    options = parser.parse_args(argv)
    quick, policies = options.quick, QUICK_POLICIES if options.quick else options.policies
    if BASE not in policies:
        parser.error(f"--policies must include {BASE}, which the others are compared with")
    options.out = options.out or Path("out/rl-quick" if quick else "out/rl")
    options.plan = Plan(
        starts=("standard",) if quick else options.starts,
        policies=policies,
        seeds=options.seeds or (QUICK_SEEDS if quick else (0, 1, 2)),
        recipe=Recipe(steps=options.steps or (QUICK_STEPS if quick else 30), held_out_every=3),
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
