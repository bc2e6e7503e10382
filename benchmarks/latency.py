"""Predict the duration of rollouts from the latency curve that the server learns, and compare it with the measured one.

    python -m benchmarks.latency

One engine in this process. Some batches of unshaped requests teach it the curve, and what a trajectory costs when it
starts, as in the server. Then both are frozen, and the time of other batches, of other sizes, is predicted from them
and their lengths (the paper's cost model, and that cost for each trajectory), and measured.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.cost_model import rollout_seconds
from darts_server.demo.problems import sample_problem
from darts_server.demo.server import ENVIRONMENT
from darts_server.policy.latency.curve import LatencyCurve
from examples.tiny_rl.engine import TinyEngine, shaping_engine

TRAINING = (1, 2, 4, 8, 16, 32)
HELD_OUT = (1, 3, 6, 12, 24, 48)
"""Prompts in a batch, with 8 trajectories each."""
SIZE = 8


@dataclass(frozen=True)
class Row:
    """A held-out batch; times in seconds."""

    sequences: int
    tokens: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.latency", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="batches of each size (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.INFO)
    print(report(*asyncio.run(measure(options.rounds))))
    return 0


async def measure(rounds: int) -> tuple[LatencyCurve, float, list[Row]]:
    rng = Random(2)
    async with shaping_engine({}) as engine:
        for number in range(rounds * len(TRAINING)):
            await run_batch(engine, f"training-{number}", TRAINING[number % len(TRAINING)], rng)
        curve, start = engine.statistics.latency.curve, engine.statistics.latency.start_seconds
        assert curve is not None, "too few steps to learn from"
        assert start is not None, "too few steps in which trajectories start"
        rows = []
        for number in range(rounds * len(HELD_OUT)):
            seconds, lengths = await run_batch(engine, f"held-out-{number}", HELD_OUT[number % len(HELD_OUT)], rng)
            decoding = rollout_seconds(curve, lengths, engine.statistics.latency.capacity)
            predicted = decoding + start * len(lengths)
            rows.append(Row(len(lengths), sum(lengths), predicted, seconds))
    return curve, start, rows


async def run_batch(engine: TinyEngine, name: str, prompts: int, rng: Random) -> tuple[float, list[int]]:
    """Run a batch of unshaped requests; return its seconds and the lengths of its trajectories."""
    texts = [sample_problem(rng).prompt for _ in range(prompts)]
    start = time.perf_counter()
    outputs = await asyncio.gather(
        *(engine.generate(text, f"{name}-{i}", "off", n=SIZE) for i, text in enumerate(texts))
    )
    return time.perf_counter() - start, [len(c.token_ids) for output in outputs for c in output.outputs]


def report(curve: LatencyCurve, start: float, rows: Sequence[Row]) -> str:
    lines = ["| running sequences | step, ms |", "|---|---|"]
    lines += [f"| {batch} | {1000 * curve.step_seconds(batch):.2f} |" for batch in (1, 8, 32, 128, 384)]
    lines += ["", f"A trajectory that starts: {1000 * start:.2f} ms."]
    lines += ["", "| sequences | tokens | predicted, s | measured, s | error |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r.sequences, r.tokens)):
        lines.append(
            f"| {row.sequences} | {row.tokens} | {row.predicted:.2f} | {row.measured:.2f} | {row.error:+.0%} |"
        )
    errors = [abs(row.error) for row in rows]
    return "\n".join([*lines, "", f"Median error {statistics.median(errors):.1%}, largest {max(errors):.0%}."])


if __name__ == "__main__":
    sys.exit(main())
