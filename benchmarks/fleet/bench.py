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
from darts_server import app, settings
from darts_server.demo.server import ENVIRONMENT, FLAGS, MODEL, bind
from darts_server.exceptions import InvalidSetting
from darts_server.http.options import merge_options
from darts_server.store import Store
from darts_server.vllm import launch, server
from darts_server.vllm.engine_host import Start
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


class ScriptedPlaces:
    """Runs all hosts as one process.

    ``late``: seconds from finish to abort. ``tokens``: that were generated. ``echo``: print what they say.
    """

    def __init__(self, rate: float, mean: float, *, echo: bool = False) -> None:
        self._rate, self._mean, self._echo = rate, mean, echo
        self.failure: InvalidSetting | None = None
        self.late: list[float] = []
        self.tokens = 0

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
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield self
        finally:
            process.terminate()
            process.wait()

    def _read(self, lines: Any) -> None:
        for line in lines:
            said = json.loads(line)
            if self._echo:
                print(line.decode(), end="", flush=True)
            self.late += said["late"]
            self.tokens = said["tokens"]

    def restart(self, rank: int) -> None:
        raise AssertionError(f"engine {rank} is lost")


@asynccontextmanager
async def coordinator(engines: int, places: ScriptedPlaces) -> AsyncIterator[Any]:
    """Run everything that a server has above its engines, and yield vLLM's engine client."""
    loaded = settings.load(
        {"policy": "uniform", "redundancy": str(CANDIDATES / GROUP_SIZE), "log_level": "ERROR"}, None
    )
    args = server.parse([*ARGV, "--max-num-seqs", str(SLOTS)])
    with Store(None) as store, Staging(None) as staging, ExitStack() as closing:
        async with launch.start_fleet(args, ARGV, engines, places.place, "127.0.0.1", 0.0) as engine:
            access = app._access(loaded, args)
            rooms = app.make_rooms(loaded, engine, access, store, staging, closing)
            engine.shape(rooms.rollouts, merge_options, rooms.updates)
            yield engine.llm


async def measure(engines: int, rate: float, mean: float, seconds: float, logprobs: int | None) -> Row:
    """Measure without HTTP."""
    places = ScriptedPlaces(rate, mean)
    async with coordinator(engines, places) as llm:
        params = SamplingParams(n=GROUP_SIZE, max_tokens=LENGTH, logprobs=logprobs, temperature=1.0)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        groups, end = 0, False

        async def keep_asking(number: int) -> None:
            nonlocal groups
            turn = 0
            while not end:
                turn += 1
                prompt = {"type": "token", "prompt_token_ids": [6, 22, 7 + number % 20, 7 + turn % 20, 25]}
                async for output in llm.generate(prompt, params, f"g{number}-{turn}"):
                    assert len(output.outputs) == GROUP_SIZE
                groups += 1

        tasks = [asyncio.create_task(keep_asking(number)) for number in range(engines * SLOTS // CANDIDATES)]
        await asyncio.sleep(WARM_SECONDS)
        places.late.clear()
        began, cpu, ended, tokens = time.monotonic(), time.process_time(), groups, places.tokens
        await asyncio.sleep(seconds)
        row = Row(
            engines,
            time.monotonic() - began,
            time.process_time() - cpu,
            (groups - ended) * CANDIDATES,
            places.tokens - tokens,
            quantiles(places.late),
        )
        end = True
        await asyncio.gather(*tasks)
    return row


async def measure_http(engines: int, rate: float, mean: float, seconds: float, logprobs: int | None) -> Row:
    """Measure a server, asked by another process: a batch of a part of the groups after the other, a few at a time."""
    with bind() as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.fleet.server", str(engines), str(rate), str(mean), str(port)]
    log = Path("out/fleet.log")
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    assert process.stdout is not None
    said: dict[str, Any] = {"tokens": 0, "late": []}

    def read() -> None:
        for line in process.stdout or ():
            if line.startswith(b"{"):
                new = json.loads(line)
                said["tokens"] = new["tokens"]
                said["late"] += new["late"]

    threading.Thread(target=read, daemon=True).start()
    prompts = [{"token_ids": [6, 22, 7 + i % 20, 25]} for i in range(PROMPTS)]
    sampling = {"max_tokens": LENGTH, "temperature": 1.0} | ({} if logprobs is None else {"logprobs": True})
    body = {"prompts": prompts, "group_size": GROUP_SIZE, "sampling": sampling}
    groups, end, url = 0, False, f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(timeout=600, base_url=url) as client:
            while True:
                assert process.poll() is None, f"the server ended; see {log}"
                try:
                    (await client.get("/health")).raise_for_status()
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.5)

            async def keep_asking() -> None:
                nonlocal groups
                while not end:
                    answer = await client.post("/darts/v1/rollouts", json=body)
                    answer.raise_for_status()
                    groups += PROMPTS

            of_server = psutil.Process(process.pid)
            tasks = [
                asyncio.create_task(keep_asking()) for _ in range(max(1, engines * SLOTS // CANDIDATES // PROMPTS))
            ]
            await asyncio.sleep(WARM_SECONDS)
            said["late"].clear()
            began, cpu, ended, tokens = time.monotonic(), cpu_seconds(of_server), groups, said["tokens"]
            await asyncio.sleep(seconds)
            row = Row(
                engines,
                time.monotonic() - began,
                cpu_seconds(of_server) - cpu,
                (groups - ended) * CANDIDATES,
                said["tokens"] - tokens,
                quantiles(said["late"]),
            )
            end = True
            await asyncio.gather(*tasks)
    finally:
        process.terminate()
        process.wait()
    return row


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the 50 % and the 99 % quantile in milliseconds."""
    if not values:
        return (float("nan"), float("nan"))
    half, most = np.quantile(values, [0.5, 0.99]) * 1000
    return float(half), float(most)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| engines | tokens/s | candidates/s | CPU ms a candidate | CPU us a token | % of a core | abort p50, p99 ms |"
    ]
    lines.append("|---" * 7 + "|")
    for row in rows:
        figures = (
            f"{row.tokens / row.seconds:,.0f}",
            f"{row.candidates / row.seconds:.0f}",
            f"{1e3 * row.cpu / max(1, row.candidates):.2f}",
            f"{1e6 * row.cpu / max(1, row.tokens):.2f}",
            f"{100 * row.cpu / row.seconds:.0f}",
            f"{row.late[0]:.1f}, {row.late[1]:.1f}",
        )
        lines.append(f"| {row.engines} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


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
