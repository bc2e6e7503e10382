"""Compare kinds of votes on the tiny task: how often each is right, and what stopping early saves.

    python -m benchmarks.voting
    python -m benchmarks.voting --quick

All kinds vote on the same problems with the same seeds, and so on the same trajectories, as far as they wait for them.
Scores are calibrated first, by votes on other problems with reported rewards. "Saved" is the share of the tokens of an
unshaped group of 8 that the vote does not generate.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from darts_client import AsyncClient, Vote
from darts_server.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.demo.server import DARTS, Server, serving
from examples.tiny_rl.remote import TIMEOUT_SECONDS

SIZE = 8
PATTERN = "#([0-9])$"
CONCURRENCY = 16
MAJORITY = "majority"
KINDS: Mapping[str, Mapping[str, Any]] = {
    MAJORITY: {},
    **{
        f"{score}, {weights}": {"weights": weights, "score": score}
        for score in ("logprob", "lowest_logprob", "head")
        for weights in ("rank", "log_odds")
    },
}
HEAD = ("--detect-at", "2,10", "--cold-steps", "0")
"""A guess has two tokens before the end of sequence, other answers some 30; at test time there are no steps."""
TRAINING_SEED = 1000
"""The first seed of training problems; the measured ones have another."""
MAX_ROUNDS = 8
"""The head should be ready after these."""

ResultT = TypeVar("ResultT")


@dataclass
class Tally:
    """Results of one kind of vote, problem by problem."""

    right: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.voting", description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=400, help="problems to vote on (default: %(default)s)")
    parser.add_argument(
        "--trained",
        type=int,
        default=200,
        help="problems in each round of training (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="96 and 64: a minute or two, too few to conclude anything")
    parser.add_argument("--no-head", action="store_true", help="leave out votes by the quality head")
    options = parser.parse_args(argv)
    if options.quick:
        options.problems, options.trained = 96, 64
    kinds = [kind for kind in KINDS if not (options.no_head and kind.startswith("head"))]
    flags = () if options.no_head else HEAD
    with serving(DARTS, Path("out/voting/server.log"), *flags) as server:
        print(asyncio.run(measure(server, kinds, options.problems, options.trained)))
        if not options.no_head:
            status = "ready" if is_head_ready(server) else "never ready"
            print(f"\nThe head was {status}: see darts_quality_status in the metrics.")
    return 0


async def measure(server: Server, kinds: Sequence[str], problems: int, trained: int) -> str:
    """Train, vote, and return the table."""
    async with AsyncClient(server.url, timeout=TIMEOUT_SECONDS) as client:
        await learn(client, "logprob, rank", trained, TRAINING_SEED)
        if "head, rank" in kinds:  # in rounds: only labels after the head's training calibrate it
            for seed in range(TRAINING_SEED, TRAINING_SEED + MAX_ROUNDS):
                await learn(client, "head, rank", trained, seed)
                if is_head_ready(server):
                    break
        tested = sample_problems(problems, 0)
        single, tokens = await sample_groups(client, tested)
        tallies = {}
        for kind in kinds:
            tallies[kind] = tally = Tally()
            votes = await for_each(tested, partial(vote, client, kind), kind)
            for problem, result in zip(tested, votes, strict=True):
                tally.right.append(float(result.answer == str(problem.answer)))
                tally.early.append(float(result.decided_early))
                tally.generated.append(result.usage.generated)
    return report(single, tokens, tallies)


def sample_problems(count: int, seed: int) -> list[Problem]:
    rng = Random(seed)
    return [sample_problem(rng) for _ in range(count)]


async def learn(client: AsyncClient, kind: str, count: int, seed: int) -> None:
    """Vote on this many problems of the seed, and report the rewards of their trajectories."""

    async def one(number: int, problem: Problem) -> None:
        result = await vote(client, kind, seed * count + number, problem)
        await client.rewards({t.trajectory_id: reward(problem, t.text) for t in result.trajectories})

    await for_each(sample_problems(count, seed), one, f"learning, {kind}")


def is_head_ready(server: Server) -> bool:
    """Return whether the head is trained and calibrated."""
    return server.metric("darts_quality_status", status="ready") == 1


async def sample_groups(client: AsyncClient, problems: Sequence[Problem]) -> tuple[list[float], list[int]]:
    """Sample 8 unshaped trajectories of each problem; return the shares of right ones, and the tokens of each group."""

    async def one(number: int, problem: Problem) -> tuple[float, int]:
        request: dict[str, Any] = {"group_size": SIZE, "max_tokens": MAX_RESPONSE_TOKENS, "seed": number * SIZE}
        groups = client.rollouts(problem.prompt, policy="off", logprobs=False, **request)
        [group] = [group async for group in groups]
        return float(np.mean([reward(problem, t.text) for t in group.trajectories])), sum(group.lengths)

    results = await for_each(problems, one, "all 8")
    return [share for share, _ in results], [tokens for _, tokens in results]


async def vote(client: AsyncClient, kind: str, number: int, problem: Problem) -> Vote:
    return await client.vote(
        problem.prompt,
        n=SIZE,
        pattern=PATTERN,
        max_tokens=MAX_RESPONSE_TOKENS,
        seed=number * SIZE,  # candidate i uses the seed + i
        **KINDS[kind],
    )


async def for_each(
    problems: Sequence[Problem], run: Callable[[int, Problem], Awaitable[ResultT]], title: str
) -> list[ResultT]:
    """Run it for each problem, some at a time; return the results in the order of the problems."""
    slots = asyncio.Semaphore(CONCURRENCY)
    with tqdm(total=len(problems), desc=title, unit="problem") as bar:

        async def one(number: int, problem: Problem) -> ResultT:
            async with slots:
                result = await run(number, problem)
                bar.update()
                return result

        return await asyncio.gather(*(one(number, problem) for number, problem in enumerate(problems)))


def report(single: Sequence[float], tokens: Sequence[int], tallies: Mapping[str, Tally]) -> str:
    """Format the table. Differences are paired, problem by problem; standard errors are in brackets."""
    head = ["vote", "right", "minus majority", "decided early", "tokens", "saved"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines.append(f"| one trajectory, no vote | {share(single)} | {difference(single, tallies)} | | | |")
    for kind, tally in tallies.items():
        row = [
            kind,
            share(tally.right),
            "" if kind == MAJORITY else difference(tally.right, tallies),
            f"{np.mean(tally.early):.0%}",
            f"{np.mean(tally.generated):.0f}",
            f"{1 - sum(tally.generated) / sum(tokens):.1%}",
        ]
        lines.append(f"| {' | '.join(row)} |")
    count = f"{len(tokens)} problems, {SIZE} samples each with a mean of {np.mean(tokens) / SIZE:.1f} tokens."
    return "\n".join([count, "", *lines])


def share(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({error(values):.3f})"


def difference(values: Sequence[float], tallies: Mapping[str, Tally]) -> str:
    less = np.subtract(values, tallies[MAJORITY].right)
    return f"{less.mean():+.3f} ({error(less):.3f})"


def error(values: Sequence[float] | np.ndarray[Any, Any]) -> float:
    """Return the standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


if __name__ == "__main__":
    sys.exit(main())
