"""Train the tiny task by GRPO under each policy and each control; compare what is learned and what it costs.

    python -m benchmarks.rl
    python -m benchmarks.rl --frozen --policies off uniform darts auto

For each start and seed all policies train in turns of a few steps, on the same prompts in the same order. Before its
turn a run's weights are pushed and the server's state under its policy is restored. So other load on the machine
affects all of them alike, and none profits from what the server learned under another. Within a turn `auto` learns how
long training takes between its batches; what is between turns it does not count. They share one server, except
for the policies that prune by quality, each of which has its own that goes on learning between turns, and for the one
that resumes, since the others' weights would make what it has generated too old. Evaluation is
unshaped, on other prompts, with the same random numbers for all policies and steps, and not part of the time. Before
training it is done once for all policies.

With --frozen the models stay as they are: trained with a learning rate of 0, all policies have the same lengths to deal
with, so that a few steps show what each costs. What they teach it does not show.

Methods called "unbiased" train with the trajectories' weights, the others with GRPO's advantages. The former are scaled
for the step as a whole; compare them with "off, unbiased", so that this is not taken for an effect of the policy.

After each turn a run is saved. The same command continues what was interrupted, and runs what is missing; so do other
--starts, --seeds, --policies or more --steps. Policies that are added later do not share turns with the earlier ones:
compare their times with care. A server's quality head is not saved, and is trained from the beginning again; nor is
what a server had generated for prompts that were carried over: these start again. The
tables need the logs alone: --report --out FOLDER reads them.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from benchmarks.rl_methods import BASE, CARRY_OVER, OWN_SERVER, PRUNING, STARTS, every_name, methods
from benchmarks.rl_picture import bars
from benchmarks.rl_table import Runs, summary, tables
from darts_client import Client
from darts_server.offline.demo.server import DARTS, MODEL, serving
from darts_server.store import Store
from examples.tiny_rl import warm_start
from examples.tiny_rl.demonstrations import VARIANTS
from examples.tiny_rl.grpo import Learner
from examples.tiny_rl.method import Method
from examples.tiny_rl.remote import TIMEOUT_SECONDS
from examples.tiny_rl.train import Progress, Recipe, train
from examples.tiny_rl.train_log import Entry, read_log

PRUNING_FLAGS = ("--detect-at", "10")
"""Answers have some 30 tokens. Runs must be longer than the 20 steps before the first pruning."""
STARTED = Path(__file__).parent / "rl_starts"
"""Models of starts: runs of several sittings, and on several machines, begin with the same weights."""
EVALUATED = 3  # steps from one evaluation to the next
LAST_ALONE = 1_000_000  # in place of it: only the last step is evaluated


@dataclass(frozen=True)
class Plan:
    """The runs."""

    starts: Sequence[str]
    policies: Sequence[str]
    seeds: Sequence[int]
    recipe: Recipe
    turn: int = EVALUATED  # steps of one policy before the next one's

    def methods(self, start: str) -> dict[str, Method]:
        """Return those that are run from a start, by name; each start has its own caps."""
        return {name: method for name, method in methods(start).items() if name in self.policies}


class Run:
    """The training run of one policy, in turns, on a server that it may share. Continues a saved run.

    Raises:
        RuntimeError: what is saved was run with other settings.
    """

    def __init__(self, client: Client, method: Method, recipe: Recipe, seed: int, model: Path, log: Path) -> None:
        self._client = client
        self._resumes = method.carry == "resume"
        self._served: int | None = None
        self._learner = Learner(model, recipe.learning_rate)
        self._progress = Progress()
        self._log, self._state, self._checkpoint = log, log.with_suffix(".state"), log.with_suffix(".pt")
        self._settings = f"{method.settings} {replace(recipe, steps=0)}"
        self.logged = 0  # entries: the evaluation before training, and one for each step
        if self._checkpoint.is_file():
            self._restore()
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
            self._state.write_bytes(Store().export())  # empty
        name = f"{log.parent.name}, {log.stem}"
        self._steps = train(client, method, self._learner, recipe, seed, self._progress, name)

    def begin(self, evaluation: Entry | None = None) -> int:
        """Log the evaluation before training, unless it is logged; return the number of new entries.

        ``evaluation``: of another run with the same seed and start, which has the same weights and random numbers.
        """
        if self.logged or evaluation is None:
            return self.advance(0)
        self._progress.evaluated = True
        self._log.write_text(f"{evaluation.line()}\n")
        self.logged = 1
        return 1

    def evaluation(self) -> Entry:
        """Return the evaluation before training."""
        return read_log(self._log)[0]

    def advance(self, step: int) -> int:
        """Take a turn: run from where this run left off until ``step``, where 0 is the evaluation before training.

        Nothing else is done between the steps of a turn. Returns the number of new entries in the log.
        """
        if self.logged > step:
            return 0
        # Pushing the same weights again would make what is to be resumed a version older.
        if not self._resumes or self._served != self._client.weights.get().version:
            self._client.weights.push(self._learner.weights())
        self._client.state.load(self._state)
        entries = list(islice(self._steps, step + 1 - self.logged))
        self._client.state.save(self._state)
        if self._resumes:
            self._served = self._client.weights.get().version
        with self._log.open("a") as log:
            log.writelines(f"{entry.line()}\n" for entry in entries)
        self.logged += len(entries)
        if self._progress.step:
            self._save()
        return len(entries)

    def _save(self) -> None:
        new = self._checkpoint.with_suffix(".new")
        saved = {"settings": self._settings, "progress": asdict(self._progress), "learner": self._learner.state()}
        torch.save(saved, new)
        os.replace(new, self._checkpoint)

    def _restore(self) -> None:
        saved = torch.load(self._checkpoint)
        if saved["settings"] != self._settings:
            raise RuntimeError(
                f"{self._log} was run with other settings ({saved['settings']}, now {self._settings}): "
                "choose another --out, or delete it with its .pt"
            )
        self._learner.load_state(saved["learner"])
        self._progress = Progress(**saved["progress"])
        self.logged = self._progress.step + 1
        # An interruption between log and checkpoint leaves entries of steps that will be run again.
        self._log.write_text("".join(self._log.read_text().splitlines(keepends=True)[: self.logged]))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    plan = options.plan
    if not options.report:
        try:
            run(plan, options.out)
        except KeyboardInterrupt:
            sys.exit("rl: interrupted; the same command continues")
    print(report(plan, options.out))
    return 0


def run(plan: Plan, out: Path) -> None:
    """Run what is missing, start by start and seed by seed; show the time left."""
    missing = {(seed, start): count_missing(plan, start, seed, out) for seed in plan.seeds for start in plan.starts}
    if not any(missing.values()):
        return
    torch.set_num_threads(1)  # the server needs the other core
    disable_progress_bar()  # of loading models
    with ExitStack() as stack:
        urls = start_servers(stack, plan.policies, out)
        clients = {url: stack.enter_context(Client(url, timeout=TIMEOUT_SECONDS)) for url in urls.values()}
        bar = stack.enter_context(tqdm(total=sum(missing.values()), unit="step", smoothing=0.02))
        for (seed, start), num_entries in missing.items():
            if not num_entries:
                continue
            bar.set_description(f"{start}, seed {seed}")
            recipe, model = replace(plan.recipe, difficulties=STARTS[start].difficulties), start_model(start, out)
            runs = [
                Run(clients[urls[name]], method, recipe, seed, model, log_path(out, start, name, seed))
                for name, method in plan.methods(start).items()
            ]
            train_in_turns(runs, recipe.steps, plan.turn, bar)


def count_missing(plan: Plan, start: str, seed: int, out: Path) -> int:
    """Count the entries that are not logged yet, over all policies."""
    num_missing = 0
    for name in plan.methods(start):
        log = log_path(out, start, name, seed)
        # A log without a checkpoint begins again.
        num_logged = len(log.read_text().splitlines()) if log.with_suffix(".pt").is_file() else 0
        num_missing += max(0, plan.recipe.steps + 1 - num_logged)
    return num_missing


def train_in_turns(runs: Sequence[Run], steps: int, turn: int, bar: "tqdm[None]") -> None:
    """Run all up to the same step, ``turn`` steps at a time; those that are behind catch up first."""
    bar.update(runs[0].begin())
    bar.update(sum(run.begin(runs[0].evaluation()) for run in runs[1:]))
    for number, step in enumerate([*range(turn, steps, turn), steps]):
        # Another run is the first in each turn.
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            bar.update(run.advance(step))


def start_servers(stack: ExitStack, policies: Sequence[str], out: Path) -> dict[str, str]:
    """Start the servers; return the address of each policy's."""
    shared = stack.enter_context(serving(DARTS, out / "server.log")).url
    urls = dict.fromkeys(policies, shared)
    for policy in policies:
        if policy in OWN_SERVER:
            flags = PRUNING_FLAGS if policy in PRUNING else ()
            urls[policy] = stack.enter_context(serving(DARTS, out / f"{policy}.log", *flags)).url
    return urls


def start_model(start: str, out: Path) -> Path:
    """Return the model of a start; one that is not in `STARTED` is trained once, in some minutes."""
    if start == "standard":
        return MODEL
    folder = STARTED / start
    if not (folder / "config.json").is_file():
        folder = out / "starts" / start
    if not (folder / "config.json").is_file():
        variant = VARIANTS[start]
        warm_start.save(warm_start.train(variant, warm_start.Recipe(steps=variant.steps), seed=0), folder)
    return folder


def report(plan: Plan, out: Path) -> str:
    """Draw the picture and format the tables, from all seeds whose runs are complete."""
    starts = {start: runs for start in plan.starts if (runs := read_runs(plan, start, out))[BASE]}
    if not starts:
        return f"no run in {out} is complete"
    bars(starts, out / "methods.png")
    of_starts = (tables(start, runs) for start, runs in starts.items())
    return "\n\n".join([f"Picture: {out / 'methods.png'}", *of_starts, summary(starts)])


def read_runs(plan: Plan, start: str, out: Path) -> Runs:
    """Read the seeds for which every policy has all steps; of longer runs, the first steps."""
    policies = plan.methods(start)
    runs: dict[str, dict[int, list[Entry]]] = {policy: {} for policy in policies}
    for seed in plan.seeds:
        logs = {policy: log_path(out, start, policy, seed) for policy in policies}
        entries = {policy: read_log(log) if log.is_file() else [] for policy, log in logs.items()}
        if all(len(each) > plan.recipe.steps for each in entries.values()):
            for policy, each in entries.items():
                runs[policy][seed] = each[: plan.recipe.steps + 1]
    return runs


def log_path(out: Path, start: str, policy: str, seed: int) -> Path:
    return out / start / f"{policy.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.rl", description=__doc__, formatter_class=form)
    add = parser.add_argument
    seeds_help = "a run of each policy from each start (default: %(default)s)"
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help=seeds_help)
    add("--steps", type=int, default=30, metavar="N", help="steps of each run (default: %(default)s)")
    add("--starts", nargs="+", choices=list(STARTS), default=list(STARTS), help="starts (default: all)")
    default = [name for name in every_name() if name not in CARRY_OVER]
    names = f"policies, of: {'; '.join(every_name())} (default: all but the last {len(CARRY_OVER)})"
    add("--policies", nargs="+", choices=every_name(), default=default, metavar="NAME", help=names)
    add("--out", type=Path, metavar="FOLDER", help="for logs and models (default: out/rl or out/rl-frozen)")
    turn_help = (
        "steps of a policy before the next one's turn; with 1 auto learns no training times (default: %(default)s)"
    )
    add("--turn", type=int, default=EVALUATED, metavar="N", help=turn_help)
    add(
        "--frozen",
        action="store_true",
        help="leave the models as they are; evaluate at the beginning and the end alone",
    )
    add("--report", action="store_true", help="run nothing; print the tables of the logs in --out")
    options = parser.parse_args(argv)
    if BASE not in options.policies:
        parser.error(f"--policies must include {BASE}, which the others are compared with")
    if options.turn < 1 or EVALUATED % options.turn:
        parser.error(f"--turn must be 1 or {EVALUATED}: evaluations lie between turns, not within")
    options.out = options.out or Path("out/rl-frozen" if options.frozen else "out/rl")
    recipe = Recipe(steps=options.steps, held_out_every=EVALUATED)
    if options.frozen:
        recipe = replace(recipe, learning_rate=0.0, held_out_every=LAST_ALONE)
    options.plan = Plan(options.starts, options.policies, options.seeds, recipe, options.turn)
    return options


if __name__ == "__main__":
    sys.exit(main())
