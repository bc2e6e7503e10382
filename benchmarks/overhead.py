"""Compare the server's throughput with shaping off with that of vLLM's own.

    python -m benchmarks.overhead

Both servers run at the same time on the same machine and take turns, round by round, so that other load on the machine
affects both. Every round generates exactly the same number of tokens (``ignore_eos``). `benchmarks.api_process` says
what shaping costs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import psutil

from benchmarks.tables import markdown, quartiles
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import DARTS, PLAIN, Server, serving

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
    parser.add_argument("--tokens", type=int, default=128, help="tokens a trajectory (default: %(default)s)")
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
    # Other load on the machine only ever slows a round down.
    head = ["throughput, shaping off / vLLM's own server", "fastest round of either"]
    print(markdown(head, [[quartiles(ratios, 3), f"{best['tiny:raw'] / best['tiny']:.3f}"]]))
    return 0


def measure(server: Server, model: str, prompts: int, sampling: Mapping[str, object]) -> Round:
    """Send all prompts at once, a request each."""
    rng = Random(0)
    texts = [sample_problem(rng).prompt for _ in range(prompts)]
    process = psutil.Process(server.process.pid)
    tokens, cpu, start = server.metric("vllm:generation_tokens_total"), cpu_seconds(process), time.perf_counter()
    asyncio.run(send_all(server, model, texts, sampling))
    seconds = time.perf_counter() - start
    # The server also spends CPU on the metrics that count the tokens.
    cpu = cpu_seconds(process) - cpu
    return Round(server.metric("vllm:generation_tokens_total") - tokens, seconds, cpu)


async def send_all(server: Server, model: str, texts: list[str], sampling: Mapping[str, object]) -> None:
    body = {"model": model, "n": GROUP_SIZE, "logprobs": 0, "return_token_ids": True, **sampling}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{server.url}/v1/completions"
        for answer in await asyncio.gather(*(client.post(url, json=body | {"prompt": text}) for text in texts)):
            answer.raise_for_status()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def print_progress(number: int, total: int, text: str) -> None:
    print(f"round {number + 1}/{total}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
