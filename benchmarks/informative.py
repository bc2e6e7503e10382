"""Train the tiny task by GRPO with groups that are chosen by their rewards, and with the controls; print a table.

    python -m benchmarks.informative
    python -m benchmarks.informative --starts late --seeds 0 --ways "off, 8" "informative, 8 of 16"
    python -m benchmarks.informative --report

Every way trains on the same prompts in the same order, from the same weights. The server verifies all answers with
`examples/tiny_rl/verifier.py`. An evaluation is unshaped, on other prompts. ``late`` is the standard model after
training until nine in ten answers are right; it is trained once.

Compared are right answers after equal numbers of steps, and what a way needed until `TARGET` of the answers were right:
trained trajectories, generated tokens and decode steps. These do not depend on other load on the machine.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import torch
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from benchmarks.rl import start_model
from benchmarks.rl_methods import STARTS
from benchmarks.tables import markdown
from darts_client import Client, Group, PromptSpec
from darts_client.advantages import server_advantages
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS
from darts_server.offline.demo.server import DARTS, MODEL, serving
from darts_server.store import Store
from examples.tiny_rl import verifier
from examples.tiny_rl.grpo import Learner, Trained, advantages
from examples.tiny_rl.remote import TIMEOUT_SECONDS, decode_steps
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.train import HELD_OUT_SEED, endless, evaluate, problems
from examples.tiny_rl.warm_start import save

PROMPTS = 16
"""Groups in a step."""
POOL = 128
HELD_OUT_PROMPTS = 96
HELD_OUT_SAMPLES = 4
EVALUATED_EVERY = 4
"""Steps between two evaluations."""
TARGET = 0.90
MAX_TRIES = 4
"""Rounds of prompts, at most, until dynamic sampling has enough groups."""
LATE = "late"
LATE_STEPS = 24
"""Steps of plain GRPO after which nine in ten answers of the standard model are right."""
LATE_SEED = 77


@dataclass(frozen=True)
class Way:
    """How the groups of a step are made.

    ``size``: M, trajectories that are trained on. ``policy``: the policy of the batch. ``dynamic``: who replaces groups
    of equal rewards, the trainer or the server.
    """

    size: int
    policy: Mapping[str, object] = field(default_factory=lambda: {"name": "off"})
    dynamic: str = ""


def informative(candidates: int, size: int = 8, **options: object) -> Mapping[str, object]:
    return {"name": "informative", "redundancy": candidates / size, "advantage_std": True, **options}


WAYS: Mapping[str, Way] = {
    "off, 8": Way(8),
    "off, 16": Way(16),
    "informative, 8 of 16": Way(8, informative(16)),
    "informative, 8 of 24": Way(8, informative(24)),
    "max_variance, 8 of 16": Way(8, informative(16, select="max_variance")),
    "dynamic sampling, trainer": Way(8, dynamic="trainer"),
    "dynamic sampling, server": Way(8, dynamic="server"),
}
BASE = "off, 16"


@dataclass(frozen=True)
class Step:
    """A step's figures. ``held_out``: share of right answers after the step, or None between evaluations."""

    step: int
    right: float = 0.0
    informative: int = 0
    """Groups whose rewards differ."""
    groups: int = 0
    trained: int = 0
    trained_tokens: int = 0
    generated: int = 0
    decode_steps: int = 0
    gap: float = 0.0
    """Largest difference between the log-probs of server and trainer, in nats."""
    held_out: float | None = None


class Trainer:
    """One run."""

    def __init__(self, client: Client, way: Way, model: Path, start: str, seed: int) -> None:
        self.client = client
        self.way = way
        self.learner = Learner(model)
        difficulties = STARTS["standard" if start == LATE else start].difficulties
        self.held_out = problems(HELD_OUT_SEED, HELD_OUT_PROMPTS, difficulties)
        self.pool = problems(seed, POOL, difficulties, avoid=self.held_out)
        self.epochs = endless(POOL, Random(seed))
        self.seed = seed
        tokenizer = build_tokenizer()
        self.tokens = [tokenizer.encode(problem.prompt) for problem in self.pool]

    def run(self, steps: int) -> Iterator[Step]:
        self.client.weights.push(self.learner.weights())
        yield Step(0, held_out=self._evaluate())
        for number in range(1, steps + 1):
            steps_before = decode_steps(self.client)
            groups, generated = self._sample()
            num_decode_steps = decode_steps(self.client) - steps_before
            batch = [trained for index, group in groups for trained in self._graded(self.tokens[index], group)]
            gap = 0.0
            if any(trained.advantage for trained in batch):
                gap = self.learner.update(batch).gap
                self.client.weights.push(self.learner.weights())
            held_out = None
            if number % EVALUATED_EVERY == 0 or number == steps:
                held_out = self._evaluate()
            yield Step(
                number,
                fmean(t.reward or 0.0 for _, group in groups for t in group.trajectories) if groups else 0.0,
                sum(not group.zero_variance for _, group in groups),
                len(groups),
                len(batch),
                sum(len(trained.logprobs) for trained in batch),
                generated,
                num_decode_steps,
                gap,
                held_out,
            )

    def _evaluate(self) -> float:
        return evaluate(self.client, self.held_out, HELD_OUT_SAMPLES, self.seed).right

    def _sample(self) -> tuple[list[tuple[int, Group]], int]:
        """Return the groups of a step with the numbers of their prompts, and the number of generated tokens."""
        if self.way.dynamic == "server":
            numbers = [next(self.epochs) for _ in range(MAX_TRIES * PROMPTS)]
            return self._sample_batch(numbers, only_informative=True)
        groups, generated = self._sample_batch([next(self.epochs) for _ in range(PROMPTS)])
        if self.way.dynamic != "trainer":
            return groups, generated
        groups = [pair for pair in groups if not pair[1].zero_variance]
        for _ in range(MAX_TRIES - 1):
            if len(groups) >= PROMPTS:
                break
            further_groups, further_tokens = self._sample_batch([next(self.epochs) for _ in range(PROMPTS)])
            generated += further_tokens
            groups += [pair for pair in further_groups if not pair[1].zero_variance]
        return groups[:PROMPTS], generated

    def _sample_batch(
        self, numbers: Sequence[int], only_informative: bool = False
    ) -> tuple[list[tuple[int, Group]], int]:
        prompts = [
            PromptSpec(self.tokens[n], metadata={"ground_truth": str(self.pool[n].answer), "data_source": "tiny"})
            for n in numbers
        ]
        batch = self.client.rollouts(
            prompts,
            group_size=self.way.size,
            max_tokens=MAX_RESPONSE_TOKENS,
            policy=self.way.policy,
            only="informative" if only_informative else None,
            num_groups=PROMPTS if only_informative else None,
        )
        groups = sorted(batch, key=lambda group: group.number)
        if batch.failed:
            raise RuntimeError(f"{len(batch.failed)} groups failed; the first: {batch.failed[0].error}")
        assert batch.usage is not None
        return [(numbers[group.number], group) for group in groups], batch.usage.generated

    def _graded(self, prompt: list[int], group: Group) -> list[Trained]:
        rewards = [trajectory.reward or 0.0 for trajectory in group.trajectories]
        values = advantages(rewards)
        if self.way.policy["name"] == "informative":
            values = server_advantages(group)
        return [
            Trained([*prompt, *trajectory.token_ids], len(prompt), trajectory.logprobs or (), value)
            for trajectory, value in zip(group.trajectories, values, strict=True)
        ]


def make_late(out: Path, client: Client) -> Path:
    """Return the folder of the late start; train it if it is missing."""
    folder = out / "starts" / LATE
    if not (folder / "config.json").is_file():
        trainer = Trainer(client, WAYS["off, 8"], MODEL, "standard", LATE_SEED)
        for _ in tqdm(trainer.run(LATE_STEPS), total=LATE_STEPS + 1, desc="late start", unit="step"):
            pass
        save(trainer.learner.model, folder)
    return folder


def run(options: argparse.Namespace) -> None:
    """Run what is missing."""
    missing = [
        (start, seed, name)
        for start in options.starts
        for seed in options.seeds
        for name in options.ways
        if len(read(options.out, start, seed, name)) <= options.steps
    ]
    if not missing:
        return
    # The server needs the other core.
    torch.set_num_threads(1)
    disable_progress_bar()
    with ExitStack() as stack:
        flags = ("--verifier", f"{verifier.__file__}:compute_score")
        url = stack.enter_context(serving(DARTS, options.out / f"server-{options.name}.log", *flags)).url
        client = stack.enter_context(Client(url, timeout=TIMEOUT_SECONDS))
        # No run profits from what the server has learned in another.
        empty = options.out / "empty.state"
        empty.write_bytes(Store().export())
        bar = stack.enter_context(tqdm(total=len(missing) * (options.steps + 1), unit="step", smoothing=0.02))
        for start, seed, name in missing:
            bar.set_description(f"{start}, {name}, seed {seed}")
            model = make_late(options.out, client) if start == LATE else start_model(start, options.out)
            client.state.load(empty)
            path = log_path(options.out, start, seed, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as log:
                for step in Trainer(client, WAYS[name], model, start, seed).run(options.steps):
                    print(json.dumps(asdict(step)), file=log, flush=True)
                    bar.update()


def log_path(out: Path, start: str, seed: int, name: str) -> Path:
    return out / start / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.jsonl"


def read(out: Path, start: str, seed: int, name: str) -> list[Step]:
    path = log_path(out, start, seed, name)
    if not path.is_file():
        return []
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()]


# --- tables -------------------------------------------------------------------


def find_target_step(steps: Sequence[Step]) -> int | None:
    """Return the first evaluated step with `TARGET` right answers, as the mean of two evaluations in a row.

    One evaluation has a standard error of .02, so a single one may reach the target by chance.
    """
    evaluated = [step for step in steps if step.held_out is not None]
    for before, after in pairwise(evaluated):
        assert before.held_out is not None
        assert after.held_out is not None
        if (before.held_out + after.held_out) / 2 >= TARGET:
            return after.step
    return None


def total(steps: Sequence[Step], name: str, until: int) -> float:
    return float(sum(getattr(step, name) for step in steps if step.step <= until))


def share_informative(run: Sequence[Step], steps: int) -> float:
    return total(run, "informative", steps) / max(1, total(run, "groups", steps))


def with_error(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean with its standard error over seeds."""
    if not values:
        return ""
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f} ± {error:.{digits}f}"


def report(out: Path, starts: Sequence[str], seeds: Sequence[int], ways: Sequence[str], steps: int) -> str:
    return "\n\n".join(table(out, start, seeds, ways, steps) for start in starts)


def table(out: Path, start: str, seeds: Sequence[int], ways: Sequence[str], steps: int) -> str:
    """Return the table of one start, of all seeds that have all ways."""
    runs = {way: {seed: read(out, start, seed, way)[: steps + 1] for seed in seeds} for way in ways}
    complete = [seed for seed in seeds if all(len(runs[way][seed]) > steps for way in ways)]
    if not complete:
        return f"{start}: no seed has all runs"
    head = [
        f"{start}, seeds {', '.join(map(str, complete))}",
        "right at the end",
        "right, mean over steps",
        "groups with signal",
        f"steps until {TARGET:g}",
        "trained trajectories until then",
        "generated tokens until then",
        "decode steps until then",
    ]
    rows = []
    for way in ways:
        way_runs = [runs[way][seed] for seed in complete]
        target_steps = [find_target_step(run) for run in way_runs]
        successful = [(run, step) for run, step in zip(way_runs, target_steps, strict=True) if step is not None]
        missed = len(way_runs) - len(successful)
        evaluations = [[step.held_out for step in run if step.held_out is not None] for run in way_runs]
        rows.append(
            [
                way,
                with_error([fmean(values[-2:]) for values in evaluations], 3),
                with_error([fmean(values) for values in evaluations], 3),
                with_error([share_informative(run, steps) for run in way_runs]),
                with_error([float(step) for _, step in successful], 1) + (f" ({missed} never)" if missed else ""),
                *(
                    with_error([total(run, name, step) / scale for run, step in successful], 1)
                    for name, scale in (("trained", 1), ("generated", 1000), ("decode_steps", 1))
                ),
            ]
        )
    return markdown(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.informative", description=__doc__, formatter_class=form)
    add = parser.add_argument
    starts = [LATE, *STARTS]
    add("--starts", nargs="+", choices=starts, default=["standard", LATE], help="default: standard late")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY", help="default: all")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--steps", type=int, default=28, metavar="N", help="steps of each run (default: %(default)s)")
    add("--name", default="0", help="name of this process in its log, if several run at once")
    add("--report", action="store_true", help="run nothing; print the tables of the logs in --out")
    add("--out", type=Path, default=Path("out/informative"), metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.steps % EVALUATED_EVERY:
        parser.error(f"--steps must be a multiple of {EVALUATED_EVERY}")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.report:
        try:
            run(options)
        except KeyboardInterrupt:
            sys.exit("informative: interrupted; the same command continues with the missing runs")
    print(report(options.out, options.starts, options.seeds, options.ways, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
