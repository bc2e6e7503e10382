"""What new weights cost: seconds by phase and by way, and whether anything is lost when they come in a row.

    python -m benchmarks.weights

The tiny model and one of 250 MB are given new weights, pushed and from disk, while the server has nothing else to do.
Then the tiny model is given many in a row under each rule, while callers keep groups running.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.tiny_rl.server import MODEL, Server, serving

PHASES = ("transfer", "check", "wait", "pause", "load", "resume")
ROUTE = "/darts/v1/weights"
LARGE: Mapping[str, Any] = {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 15, "head_dim": 64}
"""Of the tiny model's kind, with 63 million parameters in float32."""
GROUP_SIZE = 8


@dataclass
class Row:
    """What updates in a row did to callers."""

    groups: int = 0
    mixed: int = 0
    lost: int = 0
    seconds: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.weights", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="updates of each kind (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=200, help="updates in a row (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=32, help="groups that run meanwhile (default: %(default)s)")
    options = parser.parse_args(argv)
    out = Path("out/weights").resolve()
    large = make_large(out / "large")
    for name, model in (("large", large), ("tiny", MODEL)):
        with served(model, out) as server:
            size = (model / "model.safetensors").stat().st_size / 1e6
            for line in costs(server, model, out, options.rounds):
                print(f"{name} ({size:.0f} MB), {line}", flush=True)
            if name == "tiny" and options.updates:
                for line in rows(server, options.updates, options.groups):
                    print(line, flush=True)
    return 0


def served(model: Path, out: Path) -> Any:
    command = ("darts_server", "serve", str(model))
    return serving(command, out / "server.log", "--weights-root", str(out), "--weights-staging", str(out))


def make_large(folder: Path) -> Path:
    """A model of the tiny one's kind, untrained."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        tiny = Qwen3Config.from_pretrained(MODEL)
        config = Qwen3Config(**(tiny.to_dict() | {"layer_types": None, **LARGE}))
        Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            copy(MODEL / name, folder)
    return folder


def costs(server: Server, model: Path, out: Path, rounds: int) -> list[str]:
    """Medians of updates of an idle server."""
    weights = load_file(model / "model.safetensors")
    save_file(weights, out / "new.safetensors")
    body = (out / "new.safetensors").read_bytes()
    ways: dict[str, Callable[[], httpx.Response]] = {
        "pushed": lambda: httpx.put(server.url + ROUTE, content=body, timeout=None),
        "from disk": lambda: httpx.post(server.url + ROUTE, json={"path": "new.safetensors"}, timeout=None),
    }
    lines = []
    for way, send in ways.items():
        seen: dict[str, list[float]] = {}
        for _ in range(rounds + 1):
            began = time.monotonic()
            answer = send().raise_for_status()
            for phase, seconds in (answer.json()["last"]["seconds"] | {"in all": time.monotonic() - began}).items():
                seen.setdefault(phase, []).append(seconds)
        told = ", ".join(f"{phase} {statistics.median(seen[phase][1:]):.3f}" for phase in (*PHASES, "in all"))
        lines.append(f"{way}: {told} s")
    return lines


def rows(server: Server, updates: int, groups: int) -> Iterator[str]:
    """Updates in a row while groups run, and the memory that they leave behind."""
    weights = load_file(MODEL / "model.safetensors")
    sets = [save(weights), save({name: tensor * 1.001 for name, tensor in weights.items()})]
    for rule in ("finish", "keep", "restart"):
        asyncio.run(row(server, sets, rule, 5, groups))  # warm-up
        before = memory(server)
        seen = asyncio.run(row(server, sets, rule, updates, groups))
        grown = memory(server) - before
        yield (
            f"{updates} in a row, {groups} groups running, {rule}: {seen.groups} groups, {seen.mixed} mixed, "
            f"{seen.lost} lost, {statistics.median(seen.seconds):.3f} s each, at most {max(seen.seconds):.3f} s, "
            f"memory {grown:+.0f} MB"
        )


async def row(server: Server, sets: Sequence[bytes], rule: str, updates: int, groups: int) -> Row:
    """Callers ask for one group after the other while updates follow each other."""
    seen, over = Row(), asyncio.Event()
    body = {"prompts": [{"text": "7a-5b*4>"}], "group_size": GROUP_SIZE, "sampling": {"max_tokens": 120}}

    async def ask(client: httpx.AsyncClient) -> None:
        while not over.is_set():
            answer = await client.post(f"{server.url}/darts/v1/rollouts", json=body)
            whole = answer.status_code == 200 and len(answer.json()["groups"][0]["trajectories"]) == GROUP_SIZE
            seen.lost += not whole
            seen.groups += whole
            seen.mixed += whole and answer.json()["groups"][0]["mixed_versions"]

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(groups)]
        for number in range(updates):
            began = time.monotonic()
            url = f"{server.url}{ROUTE}?rule={rule}"
            (await client.put(url, content=sets[number % 2])).raise_for_status()
            seen.seconds.append(time.monotonic() - began)
        over.set()
        await asyncio.gather(*asking)
    return seen


def memory(server: Server) -> float:
    """Megabytes of the server and its engine, as far as these were used: of the KV cache too."""
    process = psutil.Process(server.process.pid)
    return float(sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))) / 1e6


if __name__ == "__main__":
    sys.exit(main())
