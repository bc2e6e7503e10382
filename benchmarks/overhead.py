"""Compare the server with vLLM's own: throughput with shaping off, and CPU time per token when shaping.

    python -m benchmarks.overhead

Both servers run at the same time on the same machine and take turns, round by round, so that other load on the machine
affects both. Every round generates exactly the same number of tokens (``ignore_eos``). The second part compares the
CPU time of the API process per generated token, shaped against raw, on trajectories with their natural lengths.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import psutil

from darts_server.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from darts_server.demo.server import DARTS, PLAIN, Server, serving

# darts-server's default on a CPU, for both servers.
SCHEDULER = ("--no-enable-chunked-prefill",)
GROUP_SIZE = 8


@dataclass(frozen=True)
class Round:
    """One load on one server. ``cpu``: seconds of the API process."""

    tokens: float
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_token(self) -> float:
        return self.cpu / self.tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="groups of 8 a round (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens a trajectory, first part (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    logs = Path("out/overhead")
    with (
        serving(PLAIN, logs / "plain.log", *SCHEDULER) as plain,
        serving(DARTS, logs / "darts.log", *SCHEDULER) as darts,
    ):
        fixed = {"max_tokens": options.tokens, "ignore_eos": True}
        for server in (plain, darts):
            measure(server, "tiny", options.prompts, fixed)  # warm-up
        ratios, best = [], {"tiny": 0.0, "tiny:raw": 0.0}
        for number in range(options.rounds):
            pair = [(plain, "tiny"), (darts, "tiny:raw")]
            order = pair if number % 2 == 0 else pair[::-1]
            rates = {model: measure(server, model, options.prompts, fixed).rate for server, model in order}
            ratios.append(rates["tiny:raw"] / rates["tiny"])
            best = {model: max(rate, rates[model]) for model, rate in best.items()}
            print_progress(number, options.rounds, f"{rates['tiny']:.0f} and {rates['tiny:raw']:.0f} tokens/s")
        free = {"max_tokens": MAX_RESPONSE_TOKENS}
        cpu: dict[str, list[float]] = {"tiny:raw": [], "tiny": []}
        for number in range(options.rounds):
            for model in sorted(cpu, reverse=number % 2 == 0):
                cpu[model].append(measure(darts, model, options.prompts, free).cpu_per_token * 1e6)
            print_progress(
                number, options.rounds, f"{cpu['tiny:raw'][-1]:.0f} and {cpu['tiny'][-1]:.0f} us CPU a token"
            )
    print(report(ratios, best["tiny:raw"] / best["tiny"], cpu["tiny:raw"], cpu["tiny"]))
    return 0


def measure(server: Server, model: str, prompts: int, sampling: Mapping[str, object]) -> Round:
    """Send all prompts at once, a request each."""
    rng = Random(0)
    texts = [sample_problem(rng).prompt for _ in range(prompts)]
    process = psutil.Process(server.process.pid)
    tokens, cpu, start = server.metric("vllm:generation_tokens_total"), cpu_seconds(process), time.perf_counter()
    asyncio.run(send_all(server, model, texts, sampling))
    seconds = time.perf_counter() - start
    return Round(server.metric("vllm:generation_tokens_total") - tokens, seconds, cpu_seconds(process) - cpu)


async def send_all(server: Server, model: str, texts: list[str], sampling: Mapping[str, object]) -> None:
    body = {"model": model, "n": GROUP_SIZE, "logprobs": 0, "return_token_ids": True, **sampling}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{server.url}/v1/completions"
        for answer in await asyncio.gather(*(client.post(url, json=body | {"prompt": text}) for text in texts)):
            answer.raise_for_status()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report(ratios: list[float], best: float, raw: list[float], shaped: list[float]) -> str:
    """Format the table: medians, with the middle half of the rounds in brackets.

    ``best``: ratio of the fastest rounds of the two servers. Other load on the machine only ever slows a round down.
    """
    per_round = [s / r for s, r in zip(shaped, raw, strict=True)]
    rows = [
        ("throughput, shaping off / vLLM's own server", quartiles(ratios, 3)),
        ("the same, fastest round of either", f"{best:.3f}"),
        ("API process, CPU us per generated token, raw", quartiles(raw, 1)),
        ("API process, CPU us per generated token, shaped", quartiles(shaped, 1)),
        ("the same, shaped / raw", quartiles(per_round, 3)),
    ]
    lines = ["| measured | median [quartiles] |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def quartiles(values: list[float], digits: int) -> str:
    """Format the median, with the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def print_progress(number: int, total: int, text: str) -> None:
    print(f"round {number + 1}/{total}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
