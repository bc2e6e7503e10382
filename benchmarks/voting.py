"""Votes on the tiny task: how often each kind of vote is right, and what it saves to stop when it is certain.

    python -m benchmarks.voting
    python -m benchmarks.voting --quick

All kinds vote on the same problems with the same seeds, so on the same trajectories, as far as they wait for them.
What scores are worth is learned first, from votes on other problems whose trajectories' rewards are reported. "Saved"
are tokens that an unshaped group of all 8 generates and the vote does not.
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
AT_ONCE = 16
"""Votes that run side by side."""
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
"""A guess has two tokens before its end, other answers some 30; and at test time there are no steps."""
TRAINED = 1000
"""The seed of the first problems that are learned from; those that count have another."""
ROUNDS = 8
"""In which the head should be ready."""

DoneT = TypeVar("DoneT")


@dataclass
class Tally:
    """What one kind of vote did, problem by problem."""

    right: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.voting", description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=400, help="that are voted on (default: %(default)s)")
    parser.add_argument(
        "--trained",
        type=int,
        default=200,
        help="that are learned from, at a time (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="96 and 64: a minute or two, too few to conclude anything")
    parser.add_argument("--no-head", action="store_true", help="leave out votes that go by the quality head")
    options = parser.parse_args(argv)
    if options.quick:
        options.problems, options.trained = 96, 64
    kinds = [kind for kind in KINDS if not (options.no_head and kind.startswith("head"))]
    flags = () if options.no_head else HEAD
    with serving(DARTS, Path("out/voting/server.log"), *flags) as server:
        print(asyncio.run(measure(server, kinds, options.problems, options.trained)))
        if not options.no_head:
            print(f"\nThe head was {'' if ready(server) else 'never '}ready: see darts_quality_status in the metrics.")
    return 0


async def measure(server: Server, kinds: Sequence[str], problems: int, trained: int) -> str:
    """Learns, votes, and gives the table."""
    async with AsyncClient(server.url, timeout=TIMEOUT_SECONDS) as client:
        await learn(client, "logprob, rank", trained, TRAINED)
        if "head, rank" in kinds:  # in rounds: only labels that come when the head is trained calibrate it
            for seed in range(TRAINED, TRAINED + ROUNDS):
                await learn(client, "head, rank", trained, seed)
                if ready(server):
                    break
        asked = sampled(problems, 0)
        single, tokens = await singles(client, asked)
        tallies = {}
        for kind in kinds:
            tallies[kind] = tally = Tally()
            votes = await each(asked, partial(vote, client, kind), kind)
            for problem, told in zip(asked, votes, strict=True):
                tally.right.append(float(told.answer == str(problem.answer)))
                tally.early.append(float(told.decided_early))
                tally.generated.append(told.usage.generated)
    return report(single, tokens, tallies)


def sampled(count: int, seed: int) -> list[Problem]:
    rng = Random(seed)
    return [sample_problem(rng) for _ in range(count)]


async def learn(client: AsyncClient, kind: str, count: int, seed: int) -> None:
    """Vote on so many problems of that seed, and tell what the trajectories were worth."""

    async def one(number: int, problem: Problem) -> None:
        told = await vote(client, kind, seed * count + number, problem)
        await client.rewards({t.trajectory_id: reward(problem, t.text) for t in told.trajectories})

    await each(sampled(count, seed), one, f"learning, {kind}")


def ready(server: Server) -> bool:
    """Whether the head is trained and calibrated."""
    return server.metric("darts_quality_status", status="ready") == 1


async def singles(client: AsyncClient, problems: Sequence[Problem]) -> tuple[list[float], list[int]]:
    """Of each problem's 8 trajectories, unshaped: the share of right ones, and how many tokens they have together."""

    async def one(number: int, problem: Problem) -> tuple[float, int]:
        asked: dict[str, Any] = {"group_size": SIZE, "max_tokens": MAX_RESPONSE_TOKENS, "seed": number * SIZE}
        groups = client.rollouts(problem.prompt, policy="off", logprobs=False, **asked)
        [group] = [group async for group in groups]
        return float(np.mean([reward(problem, t.text) for t in group.trajectories])), sum(group.lengths)

    done = await each(problems, one, "all 8")
    return [share for share, _ in done], [tokens for _, tokens in done]


async def vote(client: AsyncClient, kind: str, number: int, problem: Problem) -> Vote:
    return await client.vote(
        problem.prompt,
        n=SIZE,
        pattern=PATTERN,
        max_tokens=MAX_RESPONSE_TOKENS,
        seed=number * SIZE,  # candidate i uses the seed + i
        **KINDS[kind],
    )


async def each(problems: Sequence[Problem], do: Callable[[int, Problem], Awaitable[DoneT]], what: str) -> list[DoneT]:
    """Do it for each problem, some at a time; what came of it in their order."""
    room = asyncio.Semaphore(AT_ONCE)
    with tqdm(total=len(problems), desc=what, unit="problem") as bar:

        async def one(number: int, problem: Problem) -> DoneT:
            async with room:
                done = await do(number, problem)
                bar.update()
                return done

        return await asyncio.gather(*(one(number, problem) for number, problem in enumerate(problems)))


def report(single: Sequence[float], tokens: Sequence[int], tallies: Mapping[str, Tally]) -> str:
    """The table. Differences are paired, problem by problem; in brackets are standard errors."""
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
    count = f"{len(tokens)} problems, {SIZE} samples each of {np.mean(tokens) / SIZE:.1f} tokens in the mean."
    return "\n".join([count, "", *lines])


def share(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f} ({error(values):.3f})"


def difference(values: Sequence[float], tallies: Mapping[str, Tally]) -> str:
    less = np.subtract(values, tallies[MAJORITY].right)
    return f"{less.mean():+.3f} ({error(less):.3f})"


def error(values: Sequence[float] | np.ndarray[Any, Any]) -> float:
    """Standard error of the mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


if __name__ == "__main__":
    sys.exit(main())
