"""Start the longest expected candidates first, or as they come: how long a rollout takes where candidates queue.

    python -m benchmarks.starting_order

The tiny task on two servers with few slots: one as vLLM schedules by default, one with ``--scheduling-policy
priority``. Both learn the prompts' lengths first. Then the same prompts with the same seeds take turns: every prompt in
a request of its own, in one shuffled order, on either server; and all prompts in one batch on the first server, which
starts a batch's groups in the order of their expected lengths without that flag.

Counted are seconds until the last group is complete, and the engine's steps, which other work on the machine does not
change. No order needs fewer steps than the longest candidate has tokens, nor than all tokens divided by the slots.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import httpx

from benchmarks.rl_table import markdown
from darts_server.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from darts_server.demo.server import DARTS, Server, serving

SIZE = 4
SEEDS = 100
"""Between those of two rounds."""
REQUEST_SECONDS = 300.0
STEPS = "vllm:iteration_tokens_total_count"
"""vLLM observes this histogram once in each step of the engine."""
PRIORITY = ("--scheduling-policy", "priority")
ARRIVAL, LONGEST_FIRST, ONE_BATCH = "as they come", "longest expected first", "one batch, as they come"


@dataclass(frozen=True)
class Workload:
    """What is run in every round."""

    prompts: Sequence[str]

    def batches(self, way: str, number: int) -> list[dict[str, Any]]:
        """Return the bodies of a round's requests: the same prompts, seeds and order whatever the way."""
        order = list(range(len(self.prompts)))
        Random(number).shuffle(order)
        prompts = [{"text": self.prompts[each], "key": f"prompt {each}"} for each in order]
        requests = [prompts] if way == ONE_BATCH else [[prompt] for prompt in prompts]
        return [body(each, number * SEEDS) for each in requests]


def body(prompts: Sequence[Mapping[str, str]], seed: int) -> dict[str, Any]:
    sampling = {"max_tokens": MAX_RESPONSE_TOKENS, "seed": seed}
    return {"prompts": prompts, "group_size": SIZE, "sampling": sampling, "policy": {"name": "off"}}


@dataclass(frozen=True)
class Rollout:
    """All groups of a round. ``steps``: of the engine. ``lengths``: tokens of each candidate."""

    seconds: float
    steps: float
    lengths: Sequence[int]

    def least_steps(self, slots: int) -> int:
        """Return how many steps these candidates need at least, in any order."""
        return max(*self.lengths, ceil(sum(self.lengths) / slots))


async def run(server: Server, bodies: Sequence[Mapping[str, Any]]) -> Rollout:
    """Send requests in their order, all at once, and wait for the last answer."""
    steps, limits = server.metric(STEPS), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_SECONDS, limits=limits, verify=False) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/darts/v1/rollouts", json=each) for each in bodies))
        seconds = time.perf_counter() - began
    groups = [group for answer in answers for group in answer.raise_for_status().json()["groups"]]
    lengths = [trajectory["length"] for group in groups for trajectory in group["trajectories"]]
    return Rollout(seconds, server.metric(STEPS) - steps, lengths)


def measure(servers: Mapping[str, Server], workload: Workload, rounds: int, learning: int) -> dict[str, list[Rollout]]:
    """Let all servers learn, then run the rounds, each in another order of the ways."""
    found: dict[str, list[Rollout]] = {way: [] for way in servers}
    for number in range(learning):
        for way in (ARRIVAL, LONGEST_FIRST):
            asyncio.run(run(servers[way], workload.batches(ONE_BATCH, number)))
    for number in range(learning, learning + rounds):
        ways = list(servers)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(asyncio.run(run(servers[way], workload.batches(way, number))))
            print(f"round {number - learning}, {way}: {found[way][-1].seconds:.2f} s", file=sys.stderr, flush=True)
    return found


def report(found: Mapping[str, Sequence[Rollout]], slots: int) -> str:
    """Return the table: of each way the means, and the ratios to the first one with their standard errors."""
    first = found[ARRIVAL]
    rows = []
    for way, rollouts in found.items():
        seconds = [one.seconds / other.seconds for one, other in zip(rollouts, first, strict=True)]
        steps = [one.steps / other.steps for one, other in zip(rollouts, first, strict=True)]
        least = [one.steps / one.least_steps(slots) for one in rollouts]
        mean = fmean(one.seconds for one in rollouts), fmean(one.steps for one in rollouts)
        tokens = fmean(sum(one.lengths) for one in rollouts)
        rows.append(
            [way, f"{tokens:,.0f}", f"{mean[0]:.2f}", spread(seconds), f"{mean[1]:,.0f}", spread(steps), spread(least)]
        )
    head = ["groups start", "tokens", "seconds", "ratio", "steps", "ratio", "steps / least possible"]
    return markdown(head, rows)


def spread(values: Sequence[float]) -> str:
    """Return the mean and its standard error."""
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{fmean(values):.3f} ± {error:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.starting_order", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="of each way (default: %(default)s)")
    parser.add_argument("--learning", type=int, default=2, help="batches before these (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of a round, in groups of 4 (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=16, help="vLLM's --max-num-seqs (default: %(default)s)")
    options = parser.parse_args(argv)
    rng, slots = Random(5), ("--max-num-seqs", str(options.slots))
    workload = Workload([sample_problem(rng).prompt for _ in range(options.prompts)])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        default = running.enter_context(serving(DARTS, Path(folder, "default.log"), *slots))
        priority = running.enter_context(serving(DARTS, Path(folder, "priority.log"), *slots, *PRIORITY))
        servers = {ARRIVAL: default, LONGEST_FIRST: priority, ONE_BATCH: default}
        found = measure(servers, workload, options.rounds, options.learning)
    print(report(found, options.slots))
    return 0


if __name__ == "__main__":
    sys.exit(main())
