"""Measure what the probe of hidden states costs: throughput and CPU time, against the same engine without it.

    python -m benchmarks.probe

One engine, whose workers get the probe installed and removed between rounds: without it, installed but idle (pruning
off), and with every candidate probed at three points. The three take turns, so that other load on the machine affects
all of them. Every round generates exactly the same number of tokens (``ignore_eos``). Where rounds differ by a tenth,
such ratios cannot show a hundredth, so the time that steps spend in the probe itself is measured too.

Expected before the first run: 1.00 for the idle probe, which adds a check of two empty containers to a step of 10 ms;
0.98 with all candidates probed, since the API process gets three reports for each. The target is 0.98 for the idle
probe.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil

from benchmarks.overhead import cpu_seconds
from darts_server.demo.problems import sample_problem
from darts_server.demo.server import ENVIRONMENT
from darts_server.engine.port import HiddenState, Probe
from darts_server.policy.shaping import Shaping
from darts_server.vllm.engine import VllmEngine
from darts_server.vllm.prompt_request import PromptRequest
from examples.tiny_rl.engine import TinyEngine, final_only, shaping_engine

DETECT_AT = (8, 24, 48)
RESAMPLES = 400
WITHOUT, IDLE, PROBED = "without", "idle", "every candidate probed, three times"
FLAGS = ("--worker-extension-cls", "benchmarks.probe.Switch", "--max-num-seqs", "64")


class Timed:
    """A function that measures the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*args, **options)
        finally:
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Switch:
    """Remove the probe from the model runner, and install it again. A mixin of vLLM's worker, beside our extension."""

    _removed: Any = None
    _with_runner: Timed | None = None
    _runner: Timed | None = None

    def benchmark_probe(self, on: bool) -> None:
        worker: Any = self
        # The probe is an attribute of the instance that shadows the class's method; without it, that method runs.
        attributes = vars(worker.model_runner)
        if self._with_runner is None:
            probe = attributes["execute_model"].__self__
            probe._execute = self._runner = Timed(probe._execute)
            attributes["execute_model"] = self._with_runner = Timed(probe.execute_model)
        if on and self._removed is not None:
            attributes["execute_model"], self._removed = self._removed, None
        elif not on and self._removed is None:
            self._removed = attributes.pop("execute_model")

    def benchmark_spent(self) -> float:
        """Return the seconds that steps spent in the probe, without the model runner, since the last call."""
        assert self._with_runner is not None
        assert self._runner is not None
        return self._with_runner.take() - self._runner.take()


@dataclass(frozen=True)
class Round:
    """Attributes:
    rate: tokens a second.
    engine, api: CPU microseconds per token of each process.
    share: of the time that steps spent in the probe.
    """

    rate: float
    engine: float
    api: float
    share: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.probe", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each of the three (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=128, help="candidates in a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each candidate (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rounds = asyncio.run(measure(options.rounds, options.candidates, options.tokens))
    print(report(rounds))
    return 0


async def measure(rounds: int, candidates: int, tokens: int) -> dict[str, list[Round]]:
    """Return the rounds of each of the three."""
    rounds_of: dict[str, list[Round]] = {WITHOUT: [], IDLE: [], PROBED: []}
    async with shaping_engine({"uniform": Shaping()}, *FLAGS) as engine:
        assert isinstance(engine.port, VllmEngine)
        assert engine.port.probe_fault is None, engine.port.probe_fault
        await run_round(engine, PROBED, candidates, tokens)  # warm-up
        for number in range(rounds):
            kinds = list(rounds_of)
            for kind in kinds[number % 3 :] + kinds[: number % 3]:
                rounds_of[kind].append(await run_round(engine, kind, candidates, tokens))
            rates = ", ".join(f"{kind} {rounds_of[kind][-1].rate:.0f}" for kind in kinds)
            print(f"round {number + 1}/{rounds}: {rates} tokens/s", file=sys.stderr)
    return rounds_of


async def run_round(engine: TinyEngine, kind: str, candidates: int, tokens: int) -> Round:
    """Run all candidates at once."""
    rng = Random(0)
    reports: list[HiddenState] = []
    probe = Probe(DETECT_AT, reports.append) if kind == PROBED else None
    params = final_only(max_tokens=tokens, ignore_eos=True)
    prompts = [engine.prompt(sample_problem(rng).prompt) for _ in range(candidates)]
    await engine.llm.collective_rpc("benchmark_probe", args=(kind != WITHOUT,))
    await engine.llm.collective_rpc("benchmark_spent")
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before, start = [cpu_seconds(p) for p in processes], time.perf_counter()

    async def one(number: int, prompt: Any) -> None:
        running = await engine.port.start(PromptRequest(prompt, params, f"{kind}-{number}"), 0, probe)
        await running.result()

    await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    seconds = time.perf_counter() - start
    spent = [(cpu_seconds(p) - b) * 1e6 / (candidates * tokens) for p, b in zip(processes, before, strict=True)]
    (in_probe,) = await engine.llm.collective_rpc("benchmark_spent")
    while probe is not None and len(reports) < len(DETECT_AT) * candidates:
        await asyncio.sleep(0.01)
    return Round(candidates * tokens / seconds, sum(spent[1:]), spent[0], in_probe / seconds)


def report(rounds_of: dict[str, list[Round]]) -> str:
    """Format the table: medians with their standard errors, and the middle half of the rounds in brackets."""
    lines = [
        f"| against the same engine {WITHOUT} it | throughput | fastest rounds | engine's CPU | API process's CPU | "
        "steps' time in the probe |",
        "|---|---|---|---|---|---|",
    ]
    for kind in (IDLE, PROBED):
        pairs = list(zip(rounds_of[kind], rounds_of[WITHOUT], strict=True))
        fastest = max(r.rate for r in rounds_of[kind]) / max(r.rate for r in rounds_of[WITHOUT])
        columns = [
            spread([one.rate / plain.rate for one, plain in pairs]),
            f"{fastest:.3f}",
            spread([one.engine / plain.engine for one, plain in pairs]),
            spread([one.api / plain.api for one, plain in pairs]),
            f"{statistics.median(one.share for one in rounds_of[kind]):.3%}",
        ]
        lines.append(f"| {kind} | {' | '.join(columns)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    rng = Random(0)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return f"{middle:.3f} ± {statistics.pstdev(medians):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
