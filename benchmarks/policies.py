"""What each policy does to the same prompts: tokens, time, and the lengths that the trainer gets.

    python -m benchmarks.policies

One engine in this process; every policy serves the same prompts in the same epochs, taking turns, and each time is
compared with that of ``off`` in the same epoch. Statistics of prompts are learned along the way, by all policies alike.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from darts_server.policy.shaping import Shaping, Tail
from darts_server.types import GroupRecord
from examples.tiny_rl.server import ENVIRONMENT
from examples.tiny_rl.task import sample_problem

SIZE = 8
POLICIES = {
    "uniform, sampled tail": Shaping(),
    "uniform, longest tail": Shaping(tail=Tail.LONGEST),
    "uniform, shortest": Shaping(num_longest=0),
    "darts, sampled tail": Shaping(adaptive=True),
    "darts, longest tail": Shaping(adaptive=True, tail=Tail.LONGEST),
}


@dataclass
class Tally:
    """What one policy did, over all epochs."""

    ratios: list[float] = field(default_factory=list)
    generated: int = 0
    lengths: list[int] = field(default_factory=list)
    groups: int = 0
    kept_longest: int = 0
    candidates: int = 0

    def add(self, records: Sequence[GroupRecord]) -> None:
        for record in records:
            kept = [c.tokens for c in record.selected]
            self.groups += 1
            self.candidates += len(record.candidates)
            self.generated += record.generated_tokens
            self.lengths += kept
            self.kept_longest += max(kept) == max(c.tokens for c in record.candidates)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.policies", description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=6, help="the first one only warms up (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="groups of 8 an epoch (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.INFO)
    tallies = asyncio.run(measure(options.epochs, options.prompts))
    print(report(tallies))
    return 0


async def measure(epochs: int, prompts: int) -> dict[str, Tally]:
    from examples.tiny_rl.engine import shaping_engine

    rng = Random(1)
    texts = [sample_problem(rng).prompt for _ in range(prompts)]
    tallies = {name: Tally() for name in ("off", *POLICIES)}
    async with shaping_engine(POLICIES) as engine:
        for epoch in range(epochs):
            seconds = {}
            for policy in sorted(tallies, reverse=bool(epoch % 2)):
                names = [f"{policy}-{epoch}-{i}" for i in range(prompts)]
                began = time.perf_counter()
                asked = zip(texts, names, strict=True)
                outputs = await asyncio.gather(*(engine.generate(t, n, policy, n=SIZE) for t, n in asked))
                seconds[policy] = time.perf_counter() - began
                if epoch and policy == "off":
                    lengths = [len(c.token_ids) for output in outputs for c in output.outputs]
                    tallies[policy].lengths += lengths
                    tallies[policy].generated += sum(lengths)
                elif epoch:
                    tallies[policy].add([engine.records[name] for name in names])
            if epoch:
                for policy, took in seconds.items():
                    tallies[policy].ratios.append(took / seconds["off"])
            print(f"epoch {epoch + 1}/{epochs}: off took {seconds['off']:.1f} s", file=sys.stderr)
    return tallies


def report(tallies: dict[str, Tally]) -> str:
    """The table. Times are medians over epochs, with the smallest and largest."""
    base = tallies["off"].generated
    head = ["policy", "candidates a group", "generated", "returned", "wasted", "time / off", "length mean", "p95"]
    lines = [f"| {' | '.join([*head, 'kept the longest'])} |", "|---" * (len(head) + 1) + "|"]
    for name, tally in tallies.items():
        returned = sum(tally.lengths)
        row = [
            name,
            f"{tally.candidates / tally.groups if tally.groups else SIZE:.2f}",
            *(f"{tokens / base:.2f}" for tokens in (tally.generated, returned, tally.generated - returned)),
            f"{statistics.median(tally.ratios):.2f} [{min(tally.ratios):.2f}, {max(tally.ratios):.2f}]",
            f"{np.mean(tally.lengths):.1f}",
            f"{np.percentile(tally.lengths, 95):.0f}",
            f"{tally.kept_longest / tally.groups:.0%}" if tally.groups else "100%",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", "Tokens are relative to those that `off` generated."])


if __name__ == "__main__":
    sys.exit(main())
