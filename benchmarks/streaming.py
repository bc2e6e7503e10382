"""Measure what streaming tokens costs: throughput by chunk size, and memory with a stalled reader.

    python -m benchmarks.streaming

All loads are the same batch with log-probs (``ignore_eos``, so that each generates the same number of tokens), on one
server. They take turns, round by round, so that other load on the machine affects all of them. The CPU time of the API
process, which a shared machine disturbs less, is measured beside throughput. The second part measures how much the
memory of the API process grows during a batch: without streaming, with a reader that keeps up, and with one that stops
reading after the first event while everything is generated.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event, Thread

import httpx
import psutil

from benchmarks.overhead import cpu_seconds, print_progress, quartiles
from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, Server, serving

GROUP_SIZE = 8
CHUNKS = (1, 16, 100)
NO_STREAMING = 0
LOADS: dict[int, dict[str, object]] = {
    NO_STREAMING: {},
    **{chunk: {"stream": "tokens", "chunk_tokens": chunk} for chunk in CHUNKS},
}
STALLED_CHUNK = 1  # the most events that could pile up
KEEPS_UP, STALLED = "read", "stalled"
MEBIBYTE = 2**20
POLL_SECONDS = 0.02
TIMEOUT = httpx.Timeout(600)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.streaming", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each load (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="groups of 8 in a batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a trajectory (default: %(default)s)")
    options = parser.parse_args(argv)
    with serving(DARTS, Path("out/streaming/server.log"), "--policy", "off") as server:
        body = batch_body(options.prompts, options.tokens)
        read_all(server, body)  # warm-up
        rounds = [run_round(server, body, number, options.rounds) for number in range(options.rounds)]
        growth = measure_memory(server, body, max(1, options.rounds // 2))
    print(report(rounds, growth, options.prompts * GROUP_SIZE * options.tokens))
    return 0


def batch_body(prompts: int, tokens: int) -> dict[str, object]:
    rng = Random(0)
    return {
        "prompts": [{"text": sample_problem(rng).prompt} for _ in range(prompts)],
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": tokens, "ignore_eos": True, "logprobs": True},
    }


# --- throughput -------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """``seconds``: of wall time. ``cpu``: seconds of the API process."""

    seconds: float
    cpu: float


Round = Mapping[int, Load]
"""By chunk size; `NO_STREAMING` for none."""


def run_round(server: Server, body: dict[str, object], number: int, total: int) -> Round:
    process = psutil.Process(server.process.pid)
    turn = number % len(LOADS)
    done: dict[int, Load] = {}
    for chunk, load in (list(LOADS.items()) * 2)[turn : turn + len(LOADS)]:
        cpu = cpu_seconds(process)
        seconds = read_all(server, body | load)
        done[chunk] = Load(seconds, cpu_seconds(process) - cpu)
    times = ", ".join(f"{chunk}: {load.seconds:.1f} s" for chunk, load in sorted(done.items()))
    print_progress(number, total, f"chunks of {times}")
    return done


def read_all(server: Server, body: Mapping[str, object]) -> float:
    """Run a batch and read its answer without parsing it; return the seconds."""
    start = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass
    return time.perf_counter() - start


# --- memory -----------------------------------------------------------------


def measure_memory(server: Server, body: dict[str, object], rounds: int) -> dict[str, list[float]]:
    """Return by how many MiB the API process grows during a batch, for each way to read it."""
    ways = {"none": body, KEEPS_UP: body | LOADS[STALLED_CHUNK], STALLED: body | LOADS[STALLED_CHUNK]}
    growth: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        turn = number % len(ways)
        order = list(ways)[turn:] + list(ways)[:turn]
        for way in order:
            with MemoryWatch(server) as watch:
                stall(server, ways[way]) if way == STALLED else read_all(server, ways[way])
            growth[way].append(watch.growth)
        print_progress(number, rounds, ", ".join(f"{way}: {growth[way][-1]:.1f} MiB" for way in ways))
    return growth


def stall(server: Server, body: Mapping[str, object]) -> None:
    """Run a batch to its end, but stop reading after the first piece."""
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT) as answer:
        next(answer.iter_raw())
        while server.busy():
            time.sleep(POLL_SECONDS)


class MemoryWatch:
    """Watch by how many MiB the API process grows at most."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.process.pid)
        self._finished = Event()
        self._thread = Thread(target=self._watch)
        self.growth = 0.0

    def __enter__(self) -> "MemoryWatch":
        self._initial = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._finished.wait(POLL_SECONDS):
            self.growth = max(self.growth, self._now() - self._initial)

    def _now(self) -> float:
        return float(self._process.memory_info().rss) / MEBIBYTE


def report(rounds: Sequence[Round], growth: Mapping[str, list[float]], tokens: int) -> str:
    """Format the table: medians, with the middle half of the rounds in brackets."""
    rows = []
    for chunk in CHUNKS:
        ratios = [one[NO_STREAMING].seconds / one[chunk].seconds for one in rounds]
        rows.append((f"throughput, chunks of {chunk} / no streaming", quartiles(ratios, 3)))
    for chunk in LOADS:
        name = f"chunks of {chunk}" if chunk else "no streaming"
        costs = [one[chunk].cpu / tokens * 1e6 for one in rounds]
        rows.append((f"API process, CPU us per generated token, {name}", quartiles(costs, 1)))
    names = {"none": "no streaming", KEEPS_UP: "a reader that keeps up", STALLED: "a stalled reader"}
    for way, values in growth.items():
        rows.append((f"API process grows by, MiB, {tokens} tokens, {names[way]}", quartiles(values, 1)))
    lines = ["| measured | median [quartiles] |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
