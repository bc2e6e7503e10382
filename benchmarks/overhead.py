"""Compare the server's throughput and the cost of its engine with those of vLLM's own server, with shaping off.

    python -m benchmarks.overhead

Both servers run at the same time on the same machine and take turns, round by round, so that other load on the machine
affects both. Every round generates exactly the same number of tokens (``ignore_eos``), and its sequences run in the
same steps. The rows are requests to vLLM's route, and a batch of ``POST /darts/v1/rollouts``, whose tokens stay in the
engine's process until their candidate ends. `benchmarks.api_process` says what the API process costs.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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


PLAIN_ROW, RAW, BATCH = "vLLM's own server", "this server", "this server, batch"


@dataclass(frozen=True)
class Round:
    """One load on one server. ``cpu`` and ``engine_cpu``: seconds of the API process, and of the engine's processes.

    ``engine_memory``: bytes that the engine's processes have for themselves after the round.
    """

    tokens: float
    seconds: float
    cpu: float
    engine_cpu: float
    engine_memory: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_token(self) -> float:
        return self.cpu / self.tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each row (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="groups of 8 a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a trajectory (default: %(default)s)")
    options = parser.parse_args(argv)
    logs = Path("out/overhead")
    with (
        serving(PLAIN, logs / "plain.log", *SCHEDULER) as plain,
        serving(DARTS, logs / "darts.log", *SCHEDULER) as darts,
    ):
        sampling = {"max_tokens": options.tokens, "ignore_eos": True, "logprobs": 0}
        measures = {
            PLAIN_ROW: lambda: measure(plain, "tiny", options.prompts, sampling),
            RAW: lambda: measure(darts, "tiny:raw", options.prompts, sampling),
            BATCH: lambda: measure_batch(darts, options.prompts, sampling),
        }
        rounds: dict[str, list[Round]] = {row: [] for row in measures}
        for number in range(options.rounds + 1):
            for row in measures if number % 2 else reversed(measures):
                rounds[row].append(measures[row]())
            shown = ", ".join(f"{row} {rounds[row][-1].rate:.0f}" for row in measures)
            print_progress(number, options.rounds + 1, f"tokens/s: {shown}")
    # The first round warms up.
    print(report({row: each[1:] for row, each in rounds.items()}))
    return 0


def report(rounds: Mapping[str, Sequence[Round]]) -> str:
    """Format the table: ratios to vLLM's own server in the same rounds, medians with quartiles."""
    head = ["/ vLLM's own server", "tokens a second", "fastest round", "engine's CPU a token", "engine's memory (MB)"]
    plain = rounds[PLAIN_ROW]
    rows = []
    for row, ours in rounds.items():
        rates = [a.rate / b.rate for a, b in zip(ours, plain, strict=True)]
        costs = [a.engine_cpu / a.tokens / (b.engine_cpu / b.tokens) for a, b in zip(ours, plain, strict=True)]
        # Other load on the machine only ever slows a round down.
        fastest = max(each.rate for each in ours) / max(each.rate for each in plain)
        memory = [ours[index].engine_memory / 1e6 for index in (0, -1)]
        shown = "{:.0f} to {:.0f}".format(*memory)
        rows.append([row, quartiles(rates, 3), f"{fastest:.3f}", quartiles(costs, 3), shown])
    return markdown(head, rows)


def measure(server: Server, model: str, prompts: int, sampling: Mapping[str, object]) -> Round:
    """Send all prompts at once, a request each."""
    body = {"model": model, "n": GROUP_SIZE, "logprobs": 0, "return_token_ids": True, **sampling}
    texts = draw_prompts(prompts)
    return measure_load(server, lambda: asyncio.run(send_all(server, body, texts)))


def measure_batch(server: Server, prompts: int, sampling: Mapping[str, object]) -> Round:
    """Send all prompts as one batch, and fetch it whole."""
    body = {
        "prompts": [{"text": text} for text in draw_prompts(prompts)],
        "group_size": GROUP_SIZE,
        "sampling": {"temperature": 1.0, **sampling},
    }
    url = f"{server.url}/darts/v1/rollouts"
    return measure_load(server, lambda: httpx.post(url, json=body, timeout=600).raise_for_status())


def measure_load(server: Server, send: Callable[[], object]) -> Round:
    """Measure what a server spends until all answers are there."""
    process = psutil.Process(server.process.pid)
    engine = process.children(recursive=True)
    tokens = server.metric("vllm:generation_tokens_total")
    cpu = cpu_seconds(process)
    engine_cpu = sum(map(cpu_seconds, engine))
    start = time.perf_counter()
    send()
    seconds = time.perf_counter() - start
    # The server also spends CPU on the metrics that count the tokens.
    cpu = cpu_seconds(process) - cpu
    return Round(
        tokens=server.metric("vllm:generation_tokens_total") - tokens,
        seconds=seconds,
        cpu=cpu,
        engine_cpu=sum(map(cpu_seconds, engine)) - engine_cpu,
        engine_memory=sum(each.memory_full_info().uss for each in engine),
    )


def draw_prompts(count: int) -> list[str]:
    rng = Random(0)
    return [sample_problem(rng).prompt for _ in range(count)]


async def send_all(server: Server, body: Mapping[str, object], prompts: Sequence[str]) -> None:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{server.url}/v1/completions"
        for answer in await asyncio.gather(*(client.post(url, json={**body, "prompt": text}) for text in prompts)):
            answer.raise_for_status()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def print_progress(number: int, total: int, text: str) -> None:
    print(f"round {number + 1}/{total}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
