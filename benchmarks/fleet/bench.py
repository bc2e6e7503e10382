"""CPU time of the coordinator, by the number of engines: scripted ones, so that nothing else takes the cores.

    python -m benchmarks.fleet                    # without HTTP: groups are asked for in the coordinator's process
    python -m benchmarks.fleet --http             # a server, and batches of POST /darts/v1/rollouts

Everything above the engines' hosts is what serves: vLLM's request processing, groups under ``uniform``, learned state.
Each engine is kept full; lengths are exponentially distributed. From finish to abort: from when a host sends the end of
the candidate that decides its group until it gets the aborts of the others.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreReadyResponse

from benchmarks.fleet.hosts import Scripted
from benchmarks.overhead import cpu_seconds
from benchmarks.tables import markdown
from darts_server import app, settings
from darts_server.exceptions import InvalidSetting
from darts_server.http.options import merge_options
from darts_server.offline.demo.server import ENVIRONMENT, FLAGS, MODEL, bind_port
from darts_server.store import Store
from darts_server.verify.verifiers import Verifiers
from darts_server.vllm import flags
from darts_server.vllm.api import launch
from darts_server.vllm.fleet.host import Start
from darts_server.weights.staging import Staging

GROUP_SIZE, CANDIDATES, SLOTS = 8, 12, 256
WARM_SECONDS = 3.0
LENGTH = 4096
PROMPTS = 20
"""Of a batch."""
ARGV = [str(MODEL), *FLAGS[:-1], str(LENGTH + 64), "--hf-overrides", '{"max_position_embeddings": 8192}']


class Row(msgspec.Struct):
    """What was measured. ``cpu``: seconds of the coordinator; ``late``: milliseconds from finish to abort."""

    engines: int
    seconds: float
    cpu: float
    candidates: float
    tokens: float
    late: tuple[float, float]


def ready() -> bytes:
    """Return vLLM's message of an engine that is ready."""
    known = EngineCoreReadyResponse.__dataclass_fields__.values()
    fields: dict[str, Any] = {field.name: None for field in known if field.default is MISSING}
    fields |= {"max_model_len": LENGTH + 64, "num_gpu_blocks": 1 << 16, "block_size": 16, "dtype": "float32"}
    fields |= {"vllm_version": "", "world_size": 1, "instance_id": "", "supports_lora": False, "max_loras": 0}
    sizes = ("data_parallel", "tensor_parallel", "pipeline_parallel", "decode_context_parallel")
    fields |= {f"{name}_size": 1 for name in sizes} | {"data_parallel_rank": 0}
    fields |= {"max_num_seqs": SLOTS, "max_num_batched_tokens": 8192}
    return msgspec.msgpack.encode(EngineCoreReadyResponse(**fields))


class Reports:
    """What scripted hosts report. ``late``: seconds from finish to abort. ``tokens``: that were generated."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self.tokens = 0

    def read(self, lines: Any, echo: bool = False) -> None:
        """Read lines of JSON until they end, in a thread; ``echo``: print them."""
        for line in lines:
            if line.startswith(b"{"):
                said = json.loads(line)
                self.late += said["late"]
                self.tokens = said["tokens"]
            if echo:
                print(line.decode(), end="", flush=True)


class ScriptedPlaces:
    """Runs all hosts as one process. ``echo``: print what they report."""

    def __init__(self, rate: float, mean: float, *, echo: bool = False) -> None:
        self._rate, self._mean, self._echo = rate, mean, echo
        self.failure: InvalidSetting | None = None
        self.reports = Reports()

    @asynccontextmanager
    async def place(self, starts: Sequence[bytes], _: int) -> AsyncIterator["ScriptedPlaces"]:
        first = msgspec.json.decode(starts[0], type=Start)
        script = Scripted(first.host, first.port, first.token, list(range(len(starts))))
        script.rate, script.mean, script.slots, script.ready = self._rate, self._mean, SLOTS, ready()
        command = [sys.executable, "-m", "benchmarks.fleet.hosts"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(script))
        process.stdin.close()
        reading = (process.stdout, self._echo)
        threading.Thread(target=self.reports.read, args=reading, daemon=True).start()
        try:
            yield self
        finally:
            process.terminate()
            process.wait()

    def restart(self, rank: int) -> None:
        raise AssertionError(f"engine {rank} is lost")


@asynccontextmanager
async def coordinator(engines: int, places: ScriptedPlaces) -> AsyncIterator[Any]:
    """Run everything that a server has above its engines, and yield vLLM's engine client."""
    loaded = settings.load(
        {"policy": "uniform", "redundancy": str(CANDIDATES / GROUP_SIZE), "log_level": "ERROR"}, None
    )
    args = flags.parse([*ARGV, "--max-num-seqs", str(SLOTS)])
    with Store(None) as store, Staging(None) as staging, ExitStack() as closing:
        async with launch.start_fleet(args, ARGV, engines, places.place, "127.0.0.1", 0.0) as engine:
            access = app._make_access(loaded, args)
            rooms = app.make_rooms(loaded, engine, access, store, staging, closing, Verifiers([]))
            engine.serve_groups(rooms.rollouts, merge_options, rooms.updates)
            yield engine.llm


async def observe(
    engines: int,
    seconds: float,
    ask: Callable[[int, int], Coroutine[Any, Any, int]],
    callers: int,
    reports: Reports,
    cpu: Callable[[], float],
) -> Row:
    """Let callers ask for groups all the while, and measure; ``ask``: returns how many groups it got."""
    groups, end = 0, False

    async def keep_asking(number: int) -> None:
        nonlocal groups
        turn = 0
        while not end:
            turn += 1
            got = await ask(number, turn)  # not within the sum, which would lose what others add meanwhile
            groups += got

    tasks = [asyncio.create_task(keep_asking(number)) for number in range(callers)]
    await asyncio.sleep(WARM_SECONDS)
    reports.late.clear()
    began, used, ended, tokens = time.monotonic(), cpu(), groups, reports.tokens
    await asyncio.sleep(seconds)
    took, used = time.monotonic() - began, cpu() - used
    half, most = np.quantile(reports.late, [0.5, 0.99]) * 1000 if reports.late else (float("nan"),) * 2
    late = float(half), float(most)
    row = Row(engines, took, used, (groups - ended) * CANDIDATES, reports.tokens - tokens, late)
    end = True
    await asyncio.gather(*tasks)
    return row


async def measure(engines: int, rate: float, mean: float, seconds: float, logprobs: int | None) -> Row:
    """Measure without HTTP."""
    places = ScriptedPlaces(rate, mean)
    async with coordinator(engines, places) as llm:
        params = SamplingParams(n=GROUP_SIZE, max_tokens=LENGTH, logprobs=logprobs, temperature=1.0)
        params.output_kind = RequestOutputKind.FINAL_ONLY

        async def ask(number: int, turn: int) -> int:
            prompt = {"type": "token", "prompt_token_ids": [6, 22, 7 + number % 20, 7 + turn % 20, 25]}
            async for output in llm.generate(prompt, params, f"g{number}-{turn}"):
                assert len(output.outputs) == GROUP_SIZE
            return 1

        return await observe(engines, seconds, ask, engines * SLOTS // CANDIDATES, places.reports, time.process_time)


async def measure_http(engines: int, rate: float, mean: float, seconds: float, logprobs: int | None) -> Row:
    """Measure a server, asked by another process: a batch of a part of the groups after the other, a few at a time."""
    with bind_port() as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.fleet.server", str(engines), str(rate), str(mean), str(port)]
    log, reports = Path("out/fleet.log"), Reports()
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    threading.Thread(target=reports.read, args=(process.stdout,), daemon=True).start()
    prompts = [{"token_ids": [6, 22, 7 + i % 20, 25]} for i in range(PROMPTS)]
    sampling = {"max_tokens": LENGTH, "temperature": 1.0} | ({} if logprobs is None else {"logprobs": True})
    body = {"prompts": prompts, "group_size": GROUP_SIZE, "sampling": sampling}
    try:
        async with httpx.AsyncClient(timeout=600, base_url=f"http://127.0.0.1:{port}") as client:
            while True:
                assert process.poll() is None, f"the server ended; see {log}"
                try:
                    (await client.get("/health")).raise_for_status()
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.5)

            async def ask(number: int, turn: int) -> int:
                (await client.post("/darts/v1/rollouts", json=body)).raise_for_status()
                return PROMPTS

            callers = max(1, engines * SLOTS // CANDIDATES // PROMPTS)
            of_server = psutil.Process(process.pid)
            return await observe(engines, seconds, ask, callers, reports, lambda: cpu_seconds(of_server))
    finally:
        process.terminate()
        process.wait()


def table(rows: Sequence[Row]) -> str:
    head = ("engines", "tokens/s", "candidates/s", "CPU ms a candidate", "CPU us a token", "% of a core")
    cells = [
        [
            str(row.engines),
            f"{row.tokens / row.seconds:,.0f}",
            f"{row.candidates / row.seconds:.0f}",
            f"{1e3 * row.cpu / max(1, row.candidates):.2f}",
            f"{1e6 * row.cpu / max(1, row.tokens):.2f}",
            f"{100 * row.cpu / row.seconds:.0f}",
            f"{row.late[0]:.1f}, {row.late[1]:.1f}",
        ]
        for row in rows
    ]
    return markdown([*head, "abort p50, p99 ms"], cells)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.fleet", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20_000, help="tokens/s of an engine (default: %(default)s)")
    parser.add_argument("--total", type=float, help="tokens/s of all engines together, in place of --rate")
    parser.add_argument("--mean", type=float, default=500, help="length of a candidate (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="measured (default: %(default)s)")
    parser.add_argument("--logprobs", action="store_true", help="ask for log-probs")
    parser.add_argument("--http", action="store_true", help="through HTTP")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = []
    for engines in options.engines:
        rate = options.rate if options.total is None else options.total / engines
        measured = measure_http if options.http else measure
        args = engines, rate, options.mean, options.seconds, 0 if options.logprobs else None
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # metrics are registered once in a process
            rows.append(pool.apply(run, (measured, args)))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    return 0


def run(measured: Callable[..., Coroutine[Any, Any, Row]], args: tuple[Any, ...]) -> Row:
    return asyncio.run(measured(*args))
