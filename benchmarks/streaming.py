"""What streaming tokens costs: throughput by chunk size against no streaming, and memory with a stalled reader.

    python -m benchmarks.streaming

All loads are the same batch with log-probs (``ignore_eos``, so that each generates the same number of tokens), on one
server, and take turns, round by round, so that whatever else the machine does hits all of them. Beside throughput there
is the CPU time of the API process, which a shared machine disturbs less. The second part compares how far the memory of
the API process grows during a batch: without streaming, with a reader that keeps up, and with one that stops reading
after the first event, while everything is generated.
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

from benchmarks.overhead import cpu_of, progress, spread
from darts_server.demo.problems import sample_problem
from darts_server.demo.server import DARTS, Server, serving

GROUP_SIZE = 8
CHUNKS = (1, 16, 100)
NO_STREAMING = 0
LOADS: dict[int, dict[str, object]] = {
    NO_STREAMING: {},
    **{chunk: {"stream": "tokens", "chunk_tokens": chunk} for chunk in CHUNKS},
}
STALLED_CHUNK = 1  # with the most events to pile up, if they did
KEPT_UP, STALLED = "read", "stalled"
MEBIBYTE = 2**20
LOOK_SECONDS = 0.02
TIMEOUT = httpx.Timeout(600)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.streaming", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="of each load (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="groups of 8 in a batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens a trajectory (default: %(default)s)")
    options = parser.parse_args(argv)
    with serving(DARTS, Path("out/streaming/server.log"), "--policy", "off") as server:
        body = batch(options.prompts, options.tokens)
        seconds(server, body)  # warm-up
        rounds = [one_round(server, body, number, options.rounds) for number in range(options.rounds)]
        grown = memory(server, body, max(1, options.rounds // 2))
    print(report(rounds, grown, options.prompts * GROUP_SIZE * options.tokens))
    return 0


def batch(prompts: int, tokens: int) -> dict[str, object]:
    rng = Random(0)
    return {
        "prompts": [{"text": sample_problem(rng).prompt} for _ in range(prompts)],
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": tokens, "ignore_eos": True, "logprobs": True},
    }


# --- throughput -------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """``seconds`` that it took, ``cpu`` seconds of the API process."""

    seconds: float
    cpu: float


Round = Mapping[int, Load]
"""By chunk size; `NO_STREAMING` for none."""


def one_round(server: Server, body: dict[str, object], number: int, of: int) -> Round:
    process = psutil.Process(server.process.pid)
    turn = number % len(LOADS)
    done: dict[int, Load] = {}
    for chunk, load in (list(LOADS.items()) * 2)[turn : turn + len(LOADS)]:
        cpu = cpu_of(process)
        took = seconds(server, body | load)
        done[chunk] = Load(took, cpu_of(process) - cpu)
    told = ", ".join(f"{chunk}: {load.seconds:.1f} s" for chunk, load in sorted(done.items()))
    progress(number, of, f"chunks of {told}")
    return done


def seconds(server: Server, body: Mapping[str, object]) -> float:
    """How long a batch takes whose reader takes all that comes, and no more."""
    began = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT) as answer:
        answer.raise_for_status()
        for _ in answer.iter_raw():
            pass
    return time.perf_counter() - began


# --- memory -----------------------------------------------------------------


def memory(server: Server, body: dict[str, object], rounds: int) -> dict[str, list[float]]:
    """By way of reading: MiB by which the API process grows during a batch."""
    ways = {"none": body, KEPT_UP: body | LOADS[STALLED_CHUNK], STALLED: body | LOADS[STALLED_CHUNK]}
    grown: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        turn = number % len(ways)
        order = list(ways)[turn:] + list(ways)[:turn]
        for way in order:
            with Memory(server) as watched:
                stalled(server, ways[way]) if way == STALLED else seconds(server, ways[way])
            grown[way].append(watched.grown)
        progress(number, rounds, ", ".join(f"{way}: {grown[way][-1]:.1f} MiB" for way in ways))
    return grown


def stalled(server: Server, body: Mapping[str, object]) -> None:
    """A batch that is generated to its end while its reader has stopped after the first piece."""
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT) as answer:
        next(answer.iter_raw())
        while server.busy():
            time.sleep(LOOK_SECONDS)


class Memory:
    """Watches the API process: how many MiB it has at most, above what it began with."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.process.pid)
        self._over = Event()
        self._watching = Thread(target=self._watch)
        self.grown = 0.0

    def __enter__(self) -> "Memory":
        self._began = self._now()
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.grown = max(self.grown, self._now() - self._began)

    def _now(self) -> float:
        return float(self._process.memory_info().rss) / MEBIBYTE


def report(rounds: Sequence[Round], grown: Mapping[str, list[float]], tokens: int) -> str:
    """The table: medians, with the middle half of the rounds in brackets."""
    rows = []
    for chunk in CHUNKS:
        ratios = [one[NO_STREAMING].seconds / one[chunk].seconds for one in rounds]
        rows.append((f"throughput, chunks of {chunk} / no streaming", spread(ratios, 3)))
    for chunk in LOADS:
        name = f"chunks of {chunk}" if chunk else "no streaming"
        costs = [one[chunk].cpu / tokens * 1e6 for one in rounds]
        rows.append((f"API process, CPU us per generated token, {name}", spread(costs, 1)))
    names = {"none": "no streaming", KEPT_UP: "a reader that keeps up", STALLED: "a stalled reader"}
    for way, values in grown.items():
        rows.append((f"API process grows by, MiB, {tokens} tokens, {names[way]}", spread(values, 1)))
    lines = ["| measured | median [quartiles] |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
