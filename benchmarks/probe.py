"""What the probe of hidden states costs: throughput and CPU time with it, against the same engine without.

    python -m benchmarks.probe

One engine, whose workers have the probe put in and taken out between rounds: without it, in it with nobody asking
(pruning off), and with every candidate asking at three points. The three take turns, so that whatever else the machine
does hits all. Every round generates exactly the same number of tokens (``ignore_eos``). On a machine whose rounds
differ by a tenth such ratios cannot tell a hundredth, so what steps spend in the probe itself is measured too.

Expected, before it was first run: with nobody asking 1.00, since a step of 10 ms is lengthened by a look at two empty
containers; with everybody asking 0.98, for the API process hears of each candidate three times. What is aimed at is
0.98 with nobody asking.
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

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import ENVIRONMENT
from darts_server.engine.port import Probe, Probed
from darts_server.policy.shaping import Shaping
from darts_server.vllm.engine import PromptRequest, VllmEngine
from examples.tiny_rl.engine import TinyEngine, final_only, shaping_engine

DETECT_AT = (8, 24, 48)
RESAMPLES = 400
WITHOUT, IDLE, ASKED = "without", "nobody asks", "everybody asks"
FLAGS = ("--worker-extension-cls", "benchmarks.probe.Switch", "--max-num-seqs", "64")


class Timed:
    """A function, and the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._function(*args, **options)
        finally:
            self._seconds += time.perf_counter() - began

    def taken(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Switch:
    """Mixed into vLLM's worker, beside our own extension: takes the probe out of the model runner, and puts it in."""

    _taken: Any = None
    _all: Timed | None = None
    _runner: Timed | None = None

    def benchmark_probe(self, on: bool) -> None:
        """``on``: whether it is in from now on."""
        worker: Any = self
        kept = vars(worker.model_runner)
        if self._all is None:
            probe = kept["execute_model"].__self__
            probe._execute = self._runner = Timed(probe._execute)
            kept["execute_model"] = self._all = Timed(probe.execute_model)
        if on and self._taken is not None:
            kept["execute_model"], self._taken = self._taken, None
        elif not on and self._taken is None:
            self._taken = kept.pop("execute_model")

    def benchmark_spent(self) -> float:
        """Seconds that steps spent in the probe, and not in the model runner, since the last call."""
        assert self._all is not None
        assert self._runner is not None
        return self._all.taken() - self._runner.taken()


@dataclass(frozen=True)
class Round:
    """``rate``: tokens a second. ``engine`` and ``api``: CPU microseconds of the processes for a token. ``share``: of
    the time, that steps spent in the probe.
    """

    rate: float
    engine: float
    api: float
    share: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.probe", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="of each of the three (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=128, help="in a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of each (default: %(default)s)")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    made = asyncio.run(measured(options.rounds, options.candidates, options.tokens))
    print(report(made))
    return 0


async def measured(rounds: int, candidates: int, tokens: int) -> dict[str, list[Round]]:
    """The rounds of each of the three."""
    made: dict[str, list[Round]] = {WITHOUT: [], IDLE: [], ASKED: []}
    async with shaping_engine({"uniform": Shaping()}, *FLAGS) as engine:
        assert isinstance(engine.port, VllmEngine)
        assert engine.port.probe_fault is None, engine.port.probe_fault
        await one_round(engine, ASKED, candidates, tokens)  # warm-up
        for number in range(rounds):
            kinds = list(made)
            for kind in kinds[number % 3 :] + kinds[: number % 3]:
                made[kind].append(await one_round(engine, kind, candidates, tokens))
            rates = ", ".join(f"{kind} {made[kind][-1].rate:.0f}" for kind in kinds)
            print(f"round {number + 1}/{rounds}: {rates} tokens/s", file=sys.stderr)
    return made


async def one_round(engine: TinyEngine, kind: str, candidates: int, tokens: int) -> Round:
    """All candidates at once."""
    rng = Random(0)
    told: list[Probed] = []
    probe = Probe(DETECT_AT, told.append) if kind == ASKED else None
    params = final_only(max_tokens=tokens, ignore_eos=True)
    prompts = [engine.prompt(sample_problem(rng).prompt) for _ in range(candidates)]
    await engine.llm.collective_rpc("benchmark_probe", args=(kind != WITHOUT,))
    await engine.llm.collective_rpc("benchmark_spent")
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    before, began = [cpu_of(p) for p in processes], time.perf_counter()

    async def one(number: int, prompt: Any) -> None:
        running = await engine.port.start(PromptRequest(prompt, params, f"{kind}-{number}"), 0, probe)
        await running.ended()

    await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    seconds = time.perf_counter() - began
    spent = [(cpu_of(p) - b) * 1e6 / (candidates * tokens) for p, b in zip(processes, before, strict=True)]
    (in_probe,) = await engine.llm.collective_rpc("benchmark_spent")
    while probe is not None and len(told) < len(DETECT_AT) * candidates:
        await asyncio.sleep(0.01)
    return Round(candidates * tokens / seconds, sum(spent[1:]), spent[0], in_probe / seconds)


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report(made: dict[str, list[Round]]) -> str:
    """The table: medians with their standard errors, and the middle half of the rounds in brackets."""
    lines = [
        f"| against the same engine {WITHOUT} it | throughput | fastest rounds | engine's CPU | API process's CPU | "
        "steps' time in the probe |",
        "|---|---|---|---|---|---|",
    ]
    for kind in (IDLE, ASKED):
        pairs = list(zip(made[kind], made[WITHOUT], strict=True))
        fastest = max(r.rate for r in made[kind]) / max(r.rate for r in made[WITHOUT])
        columns = [
            spread([one.rate / plain.rate for one, plain in pairs]),
            f"{fastest:.3f}",
            spread([one.engine / plain.engine for one, plain in pairs]),
            spread([one.api / plain.api for one, plain in pairs]),
            f"{statistics.median(one.share for one in made[kind]):.3%}",
        ]
        lines.append(f"| {kind} | {' | '.join(columns)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    rng = Random(0)
    drawn = [statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return f"{middle:.3f} ± {statistics.pstdev(drawn):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
