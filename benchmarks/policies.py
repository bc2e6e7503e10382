"""Compare policies on the same prompts: tokens, time, and the lengths of what is returned.

    python -m benchmarks.policies

One engine in this process. The policies take turns on the same prompts in every epoch, and each time is compared with
that of ``off`` in the same epoch. All policies share the prompt statistics that are learned meanwhile. "Step" is the
time until the last of the 64 groups is complete, as a training step waits for it.
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

from benchmarks.tables import markdown
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import ENVIRONMENT
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail, build_policies
from darts_server.records import GroupRecord

SIZE = 8
POLICIES = build_policies(Shaping(), Deadline(exploration=0.0)) | {
    "uniform, longest tail": Shaping(tail=Tail.LONGEST),
    "uniform, no tail": Shaping(num_longest=0),
    "darts, longest tail": Shaping(adaptive=True, tail=Tail.LONGEST),
    "uniform, cut": Shaping(deadline=Deadline(exploration=0.0)),
}


@dataclass
class Tally:
    """Totals of one policy over all epochs."""

    ratios: list[float] = field(default_factory=list)
    generated: int = 0
    lengths: list[int] = field(default_factory=list)
    groups: int = 0
    kept_longest: int = 0
    candidates: int = 0
    cuts: list[int] = field(default_factory=list)
    """Tokens at which trajectories were cut."""

    def add(self, records: Sequence[GroupRecord]) -> None:
        for record in records:
            kept = [c.tokens for c in record.selected]
            self.groups += 1
            self.candidates += len(record.candidates)
            self.generated += record.generated_tokens
            self.lengths += kept
            self.cuts += [c.tokens for c in record.selected if c.cut]
            self.kept_longest += max(kept) == max(c.tokens for c in record.candidates)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.policies", description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=6, help="the first one only warms up (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="groups of 8 an epoch (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.INFO)
    tallies, correlations = asyncio.run(measure(options.epochs, options.prompts))
    print(report(tallies, correlations))
    return 0


async def measure(epochs: int, prompts: int) -> tuple[dict[str, Tally], list[float]]:
    """Run all epochs; return the totals, and the rank correlation of spread and candidates under ``darts`` in each."""
    from examples.tiny_rl.engine import shaping_engine

    rng = Random(1)
    texts = [sample_problem(rng).prompt for _ in range(prompts)]
    tallies = {name: Tally() for name in ("off", *POLICIES)}
    correlations = []
    async with shaping_engine(POLICIES) as engine:
        for epoch in range(epochs):
            seconds = {}
            for policy in sorted(tallies, reverse=bool(epoch % 2)):
                names = [f"{policy}-{epoch}-{i}" for i in range(prompts)]
                stds = [engine.std(text) for text in texts]
                start = time.perf_counter()
                requests = zip(texts, names, strict=True)
                outputs = await asyncio.gather(*(engine.generate(t, n, policy, n=SIZE) for t, n in requests))
                seconds[policy] = time.perf_counter() - start
                if epoch and policy == "off":
                    lengths = [len(c.token_ids) for output in outputs for c in output.outputs]
                    tallies[policy].lengths += lengths
                    tallies[policy].generated += sum(lengths)
                elif epoch:
                    tallies[policy].add([engine.records[name] for name in names])
                if epoch and policy == "darts":
                    counts = [len(engine.records[name].candidates) for name in names]
                    correlations.append(rank_correlation([std or 0.0 for std in stds], counts))
            if epoch:
                for policy, took in seconds.items():
                    tallies[policy].ratios.append(took / seconds["off"])
            print(f"epoch {epoch + 1}/{epochs}: off took {seconds['off']:.1f} s", file=sys.stderr)
    return tallies, correlations


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Compute Spearman's rank correlation; equal values share their mean rank."""
    ranks = [np.searchsorted(np.sort(x), x, "left") + np.searchsorted(np.sort(x), x, "right") for x in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def report(tallies: dict[str, Tally], correlations: Sequence[float]) -> str:
    """Format the table. Times are medians over epochs, with the smallest and largest."""
    base = tallies["off"].generated
    correlation = (
        f"rank correlation of a prompt's length std and its candidates {statistics.median(correlations):.2f} "
        f"[{min(correlations):.2f}, {max(correlations):.2f}]"
    )
    head = ["policy", "candidates a group", "generated", "returned", "wasted", "step / off", "length mean", "p95"]
    head += ["kept the longest", "groups cut", "at"]
    rows = []
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
            f"{len(tally.cuts) / tally.groups:.0%}" if tally.cuts else "",
            f"{statistics.median(tally.cuts):.0f}" if tally.cuts else "",
        ]
        rows.append(row)
    return f"{markdown(head, rows)}\n\nTokens are relative to those that `off` generated.\n`darts`: {correlation}"


if __name__ == "__main__":
    sys.exit(main())
