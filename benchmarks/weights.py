"""Measure weight updates: seconds by phase and transport, and whether updates in a row lose anything.

    python -m benchmarks.weights

The tiny model and one of 300 MB are updated by every transport, on an idle server. Then the tiny model is updated many
times in a row, first on an idle server and then under each rule, while callers keep groups running. "Of a step" is the
share of the update in a step that consists of one rollout and the update, without any training.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tables import markdown
from darts_server.offline.demo.server import MODEL, Server, serving

PHASES = ("transfer", "check", "wait", "pause", "load", "resume", "total")
ROUTE = "/darts/v1/weights"
MEMORY = Path("/dev/shm")
WEIGHTS = "model.safetensors"
LARGE: Mapping[str, Any] = {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 18, "head_dim": 64}
"""The tiny model's architecture with 75 million parameters, in float32."""
PROMPTS, GROUP_SIZE, MAX_TOKENS = 16, 8, 120
RULES = ("finish", "keep", "restart")
WARM_UP = 20
BLOCKS = 600
"""Of the KV cache: few enough that the groups fill it. Pages of a larger one would be touched for the first time all
along, which would count as growth."""


@dataclass
class Series:
    """What a series of updates did to callers; ``seconds`` of each update."""

    groups: int = 0
    mixed: int = 0
    lost: int = 0
    seconds: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.weights", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="updates by each transport (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=200, help="updates in a row (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=32, help="groups running meanwhile (default: %(default)s)")
    options = parser.parse_args(argv)
    out = Path("out/weights").resolve()
    costs, rows = [], []
    for model in (make_large(out / "large"), MODEL):
        size = f"{(model / WEIGHTS).stat().st_size / 1e6:.0f} MB"
        costs += [
            [size, *line]
            for line in tqdm(measure_transports(model, out, options.rounds), f"{size}, by transport", unit="transport")
        ]
    if options.updates:
        with serve_model(MODEL, MODEL, out, "--num-gpu-blocks-override", str(BLOCKS)) as server:
            rows = list(tqdm(measure_series(server, options.updates, options.groups), "series", unit="series"))
    print(f"\nSeconds of an update of an idle server, medians of {options.rounds}:\n")
    print(markdown(["model", "transport", *PHASES, "of a step"], costs))
    if options.updates:
        print(f"\n{options.updates} updates of the tiny model in a row, {options.groups} groups running:\n")
        head = ["rule", "groups answered", "of these mixed", "lost", "an update", "longest", "memory", "engine's"]
        print(markdown(head, rows))
    return 0


def serve_model(model: Path, root: Path, out: Path, *flags: str) -> AbstractContextManager[Server]:
    """Start a server that loads weights from ``root``, and stages pushed ones in ``out``."""
    places = ("--weights-root", str(root), "--weights-staging", str(out))
    return serving(("darts_server", "serve", str(model)), out / "server.log", *places, *flags)


def make_large(folder: Path) -> Path:
    """Write an untrained model of the tiny one's architecture."""
    torch.manual_seed(0)
    tiny = Qwen3Config.from_pretrained(MODEL)
    config = Qwen3Config(**(tiny.to_dict() | {"layer_types": None, **LARGE}))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy(MODEL / name, folder)
    return folder


def measure_transports(model: Path, out: Path, rounds: int) -> Iterator[list[str]]:
    """Yield a row of the table for each transport."""
    body = (model / WEIGHTS).read_bytes()
    named = {"path": WEIGHTS}
    with tempfile.TemporaryDirectory(dir=MEMORY) as copied:
        copy(model / WEIGHTS, copied)
        with serve_model(model, model, out) as server:
            put, post = (partial(send, server.url + ROUTE, timeout=None) for send in (httpx.put, httpx.post))
            step = rollout_seconds(server)
            yield ["pushed", *measure_cost(partial(put, content=body), rounds, step)]
            yield ["from disk", *measure_cost(partial(post, json=named), rounds, step)]
        with serve_model(model, Path(copied), out) as server:
            send = partial(httpx.post, server.url + ROUTE, json=named, timeout=None)
            yield ["from memory", *measure_cost(send, rounds, step)]


def measure_cost(send: Callable[[], httpx.Response], rounds: int, step: float) -> list[str]:
    """Return the medians of an update's phases, and its share of a step."""
    seen: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        start = time.monotonic()
        answer = send().raise_for_status()
        for phase, seconds in (answer.json()["last"]["seconds"] | {"total": time.monotonic() - start}).items():
            seen.setdefault(phase, []).append(seconds)
    medians = [statistics.median(seen[phase][1:]) for phase in PHASES]
    return [*(f"{seconds:.3f}" for seconds in medians), f"{medians[-1] / (medians[-1] + step):.1%}"]


def rollout_seconds(server: Server) -> float:
    """Time the rollout of one step."""
    for prompts in (1, PROMPTS):  # the first warms up
        start = time.monotonic()
        httpx.post(f"{server.url}/darts/v1/rollouts", json=rollout_body(prompts), timeout=None).raise_for_status()
    return time.monotonic() - start


def rollout_body(prompts: int) -> dict[str, Any]:
    return {
        "prompts": [{"text": "7a-5b*4>"}] * prompts,
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": MAX_TOKENS},
    }


def measure_series(server: Server, updates: int, groups: int) -> Iterator[list[str]]:
    """Yield a row of the table for each rule."""
    weights = load_file(MODEL / WEIGHTS)
    sets = [save(weights), save({name: tensor * 1.001 for name, tensor in weights.items()})]
    for rule, callers in (("finish", 0), *((rule, groups) for rule in RULES)):
        asyncio.run(run_series(server, sets, rule, WARM_UP, callers))
        before = memory_megabytes(server)
        series = asyncio.run(run_series(server, sets, rule, updates, callers))
        api, engine = (after - then for after, then in zip(memory_megabytes(server), before, strict=True))
        counts = map(str, (series.groups, series.mixed, series.lost))
        times = f"{statistics.median(series.seconds):.3f} s", f"{max(series.seconds):.3f} s"
        name = f"`{rule}`" if callers else "idle server"
        yield [name, *counts, *times, f"{api:+.0f} MB", f"{engine:+.0f} MB"]


async def run_series(server: Server, sets: Sequence[bytes], rule: str, updates: int, groups: int) -> Series:
    """Push updates one after the other while callers request one group after the other."""
    series, finished = Series(), asyncio.Event()
    body = rollout_body(prompts=1)

    async def request_groups(client: httpx.AsyncClient) -> None:
        while not finished.is_set():
            answer = await client.post(f"{server.url}/darts/v1/rollouts", json=body)
            complete = answer.status_code == 200 and len(answer.json()["groups"][0]["trajectories"]) == GROUP_SIZE
            series.lost += not complete
            series.groups += complete
            series.mixed += complete and answer.json()["groups"][0]["mixed_versions"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        callers = [asyncio.create_task(request_groups(client)) for _ in range(groups)]
        for number in range(updates):
            start = time.monotonic()
            url = f"{server.url}{ROUTE}?rule={rule}"
            (await client.put(url, content=sets[number % 2])).raise_for_status()
            series.seconds.append(time.monotonic() - start)
        finished.set()
        await asyncio.gather(*callers)
    return series


def memory_megabytes(server: Server) -> tuple[float, float]:
    """Return the resident memory of the API process and of its engine."""
    process = psutil.Process(server.process.pid)
    engine = sum(child.memory_info().rss for child in process.children(recursive=True))
    return process.memory_info().rss / 1e6, engine / 1e6


if __name__ == "__main__":
    sys.exit(main())
