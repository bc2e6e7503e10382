"""The same prompts with and without shaped groups, on a server of its own; about a minute on two CPU cores.

    python -m examples.tiny_rl.demo

Starts darts-server with the tiny model, asks for the same groups twice, prints a table that compares the two runs and
draws their lengths. "raw" is vLLM's own n > 1; "shaped" starts more candidates than asked for and stops those that can
no longer be in the group. Run it from the root of the repository, with vLLM, the extra "dev" and clients/ installed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from random import Random

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from darts_client import AsyncClient, DartsError
from darts_server.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.demo.server import DARTS, serving
from examples.tiny_rl.demo_report import Run, picture, read_counts, table, verdict

PROMPT_SEED = 8
WARM_UP_GROUPS = 4  # an engine's first request takes seconds, which neither run should pay


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo. Exits with a message if it fails."""
    options = arguments(argv)
    console, log = Console(), options.out / "server.log"
    try:
        with ExitStack() as stack:
            with console.status(f"Starting the server; vLLM takes its time. Log: {log}"):
                server = stack.enter_context(serving(DARTS, log, port=options.port))
            raw, shaped = asyncio.run(both(server.url, options.groups, options.group_size, console))
        picture(raw, shaped, options.picture)
        text = f"{verdict(raw, shaped)}\nPicture: {options.picture}"
        console.print(table(raw, shaped), text, sep="\n", highlight=False, markup=False)
    except (DartsError, httpx.HTTPError) as error:
        sys.exit(f"demo: {error}\nThe server's log is {log}")
    except (RuntimeError, OSError) as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; its server has been stopped")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.tiny_rl.demo", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--groups", type=int, default=32, metavar="N", help="prompts, a group each (default: %(default)s)")
    add("--group-size", type=int, default=8, metavar="N", help="trajectories a group, 2 or more (default: %(default)s)")
    add("--out", type=Path, default=Path("out/demo"), help="folder for server.log and picture (default: %(default)s)")
    add("--port", type=int, default=0, help="where the server listens (default: a free port)")
    add("--picture", type=Path, metavar="FILE", help="where the picture goes (default: lengths.png in --out)")
    options = parser.parse_args(argv)
    if options.groups < 1 or options.group_size < 2:
        parser.error("--groups must be at least 1 and --group-size at least 2")
    options.picture = options.picture or options.out / "lengths.png"
    return options


async def both(url: str, count: int, size: int, console: Console) -> tuple[Run, Run]:
    """The raw run and the shaped one, of the same prompts."""
    rng = Random(PROMPT_SEED)
    problems = [sample_problem(rng) for _ in range(count)]
    columns = TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    async with AsyncClient(url) as client:
        with Progress(*columns, console=console) as bars:
            for policy in ("off", "uniform"):
                await ask(client, problems[:WARM_UP_GROUPS], size, policy, bars, "warm-up")
            raw = await ask(client, problems, size, "off", bars, "raw")
            before = read_counts(httpx.get(f"{url}/metrics").text)
            shaped = await ask(client, problems, size, "uniform", bars, "shaped")
            return raw, shaped.counted(read_counts(httpx.get(f"{url}/metrics").text) - before)


async def ask(client: AsyncClient, problems: list[Problem], size: int, policy: str, bars: Progress, name: str) -> Run:
    """A group of answers to each problem, all asked for at once."""
    shown, start = bars.add_task(name, total=len(problems)), time.perf_counter()
    lengths, right, prompts = [], 0, [problem.prompt for problem in problems]
    asked = client.stream_groups(
        prompts, group_size=size, max_tokens=MAX_RESPONSE_TOKENS, policy=policy, concurrency=len(prompts)
    )
    async with aclosing(asked) as groups:
        async for index, group in groups:
            lengths.append(group.lengths)
            right += sum(reward(problems[index], trajectory.text) == 1 for trajectory in group.trajectories)
            bars.advance(shown)
    return Run(lengths, right, time.perf_counter() - start)


if __name__ == "__main__":
    main()
