"""Train with and without session groups on one server, and print a table of both.

    python -m examples.calculator.compare --seeds 0 1 2 --out out/calculator

All runs take turns, one step each, so that a busy machine slows all of them. FOLDER has a log for each run, for example
plain-0.jsonl. With --table the command prints the table of logs that are there.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median, stdev

import torch
from tqdm import tqdm

from darts_client import AsyncClient
from darts_server.offline.demo.server import DARTS, serving
from examples.calculator.train import METHODS, MODEL, Entry, Figures, Recipe, Trainer, plain_client
from examples.tiny_rl.grpo import Learner
from examples.tiny_rl.remote import TIMEOUT_SECONDS

LAST_STEPS = 5
"""Steps at the end of a run over which right answers are averaged."""


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    # The server needs the other core.
    torch.set_num_threads(1)
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(compare(options))
    runs = {name: [read(path) for path in sorted(options.out.glob(f"{name}-*.jsonl"))] for name in METHODS}
    print(table(runs))


async def compare(options: argparse.Namespace) -> None:
    """Run all methods with all seeds, and write their logs."""
    recipe = Recipe(options.steps, held_out_samples=options.held_out_samples)
    async with AsyncExitStack() as stack:
        url = options.url or stack.enter_context(serving(DARTS, options.out / "server.log")).url
        client = await stack.enter_async_context(AsyncClient(url, timeout=TIMEOUT_SECONDS))
        plain = await stack.enter_async_context(plain_client(url))
        runs = []
        for seed in options.seeds:
            for method in METHODS.values():
                log = stack.enter_context((options.out / f"{method.name}-{seed}.jsonl").open("w"))
                trainer = Trainer(client, plain, method, Learner(options.model), recipe, seed)
                runs.append((trainer.train(), log))

        # Each run yields an entry before its first step.
        bar = stack.enter_context(tqdm(total=(recipe.steps + 1) * len(runs), unit="step"))
        for _ in range(recipe.steps + 1):
            for run, log in runs:
                entry = await anext(run)
                print(entry.line(), file=log, flush=True)
                bar.update()


def read(path: Path) -> list[Entry]:
    """Read the log of a run."""
    return [Entry.read(line) for line in path.read_text().splitlines()]


def table(runs: dict[str, list[list[Entry]]]) -> str:
    """Return the Markdown table with a column for each method: means over its runs, with standard deviations."""
    last = slice(-LAST_STEPS, None)
    rows: dict[str, Callable[[list[Entry]], float]] = {
        "right before training, other prompts": lambda run: held_out(run)[0],
        "right after training, other prompts": lambda run: held_out(run)[-1],
        f"right in training, last {LAST_STEPS} steps": lambda run: fmean(step.right for step in steps(run)[last]),
        "step, seconds, mean": lambda run: fmean(step.seconds.total for step in steps(run)),
        "step, seconds, median": lambda run: median(step.seconds.total for step in steps(run)),
        "rollout, seconds, mean": lambda run: fmean(step.seconds.rollout for step in steps(run)),
        "decode steps": lambda run: fmean(step.decode_steps for step in steps(run)),
        "sessions started": lambda run: fmean(step.sessions for step in steps(run)),
        "sessions stopped": lambda run: fmean(step.stopped for step in steps(run)),
        "turns": lambda run: fmean(step.turns for step in steps(run)),
        "tool calls made": lambda run: fmean(step.calls for step in steps(run)),
        "tool calls saved": lambda run: fmean(step.saved_calls or 0 for step in steps(run)),
        "requests after a stop": lambda run: fmean(step.late_requests for step in steps(run)),
        "tokens trained on": lambda run: fmean(step.trained for step in steps(run)),
    }
    names = [name for name, entries in runs.items() if entries]
    lines = [f"| a step | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for title, value in rows.items():
        cells = [cell([value(run) for run in runs[name]]) for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps(run: Sequence[Entry]) -> list[Figures]:
    return [entry.figures for entry in run if entry.figures is not None]


def held_out(run: Sequence[Entry]) -> list[float]:
    return [entry.held_out.right for entry in run if entry.held_out is not None]


def cell(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation with three significant digits."""
    mean = f"{fmean(values):.3g}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {stdev(values):.2g}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.calculator.compare", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED", help="default: %(default)s")
    add("--steps", type=int, default=Recipe.steps, metavar="N", help="default: %(default)s")
    add("--held-out-samples", type=int, default=Recipe.held_out_samples, metavar="N", help="default: %(default)s")
    add("--model", type=Path, default=MODEL, metavar="FOLDER", help="initial policy (default: the model beside)")
    add("--url", help="a running server with a model of the same architecture (default: start one)")
    add("--out", type=Path, default=Path("out/calculator"), metavar="FOLDER", help="default: %(default)s")
    add("--table", action="store_true", help="print the table of the logs in FOLDER, and train nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
