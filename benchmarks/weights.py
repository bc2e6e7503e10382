"""What new weights cost: seconds by phase and by way, and whether anything is lost when they come in a row.

    python -m benchmarks.weights

The tiny model and one of 300 MB are given new weights in every way there is, while the server has nothing else to do.
Then the tiny model is given many in a row, first while nobody calls and then under each rule, while callers keep groups
running. The share of a step is that of an update among itself and a rollout on the same server, without any training.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from darts_server.demo.server import MODEL, Server, serving

PHASES = ("transfer", "check", "wait", "pause", "load", "resume", "in all")
ROUTE = "/darts/v1/weights"
HERE = "127.0.0.1"
MEMORY = Path("/dev/shm")
WEIGHTS = "model.safetensors"
LARGE: Mapping[str, Any] = {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 18, "head_dim": 64}
"""Of the tiny model's kind, with 75 million parameters in float32."""
PROMPTS, GROUP_SIZE, MOST_TOKENS = 16, 8, 120
RULES = ("finish", "keep", "restart")
WARM_UP = 20
BLOCKS = 600
"""Of the KV cache. Of one that the groups never fill, new pages would be touched all along, and count as growth."""


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
    costs, rows = [], []
    for model in (make_large(out / "large"), MODEL):
        size = f"{(model / WEIGHTS).stat().st_size / 1e6:.0f} MB"
        costs += [
            f"| {size} | {line}" for line in tqdm(ways(model, out, options.rounds), f"{size}, by way", unit="way")
        ]
    if options.updates:
        with served(MODEL, MODEL, out, "--num-gpu-blocks-override", str(BLOCKS)) as server:
            rows = list(tqdm(in_a_row(server, options.updates, options.groups), "in a row", unit="row"))
    print(f"\nSeconds of an update of an idle server, medians of {options.rounds}:\n")
    print(f"| model | way | {' | '.join(PHASES)} | of a step |\n|{'---|' * (len(PHASES) + 3)}", *costs, sep="\n")
    if options.updates:
        print(f"\n{options.updates} updates of the tiny model in a row, {options.groups} groups running:\n")
        print("| rule | groups answered | of these mixed | lost | an update | longest | memory | engine's |")
        print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")
    return 0


def served(model: Path, root: Path, out: Path, *flags: str) -> AbstractContextManager[Server]:
    """``root``: where weights may come from; pushed and pulled ones are staged in ``out``."""
    places = ("--weights-root", str(root), "--weights-hosts", HERE, "--weights-staging", str(out))
    return serving(("darts_server", "serve", str(model)), out / "server.log", *places, *flags)


def make_large(folder: Path) -> Path:
    """A model of the tiny one's kind, untrained."""
    torch.manual_seed(0)
    tiny = Qwen3Config.from_pretrained(MODEL)
    config = Qwen3Config(**(tiny.to_dict() | {"layer_types": None, **LARGE}))
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copy(MODEL / name, folder)
    return folder


def ways(model: Path, out: Path, rounds: int) -> Iterator[str]:
    """Of each way a line of the table."""
    body = (model / WEIGHTS).read_bytes()
    named = {"path": WEIGHTS}
    with tempfile.TemporaryDirectory(dir=MEMORY) as copied, sender(model) as url:
        copy(model / WEIGHTS, copied)
        with served(model, model, out) as server:
            put, post = (partial(send, server.url + ROUTE, timeout=None) for send in (httpx.put, httpx.post))
            step = rollout_seconds(server)
            yield f"pushed | {cost(partial(put, content=body), rounds, step)}"
            yield f"pulled | {cost(partial(post, json={'url': f'{url}/{WEIGHTS}'}), rounds, step)}"
            yield f"from disk | {cost(partial(post, json=named), rounds, step)}"
        with served(model, Path(copied), out) as server:
            send = partial(httpx.post, server.url + ROUTE, json=named, timeout=None)
            yield f"from memory | {cost(send, rounds, step)}"


def cost(send: Callable[[], httpx.Response], rounds: int, step: float) -> str:
    """Medians of an update's phases, and its share of a step."""
    seen: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        began = time.monotonic()
        answer = send().raise_for_status()
        for phase, seconds in (answer.json()["last"]["seconds"] | {"in all": time.monotonic() - began}).items():
            seen.setdefault(phase, []).append(seconds)
    medians = [statistics.median(seen[phase][1:]) for phase in PHASES]
    share = medians[-1] / (medians[-1] + step)
    return f"{' | '.join(f'{seconds:.3f}' for seconds in medians)} | {share:.1%} |"


def rollout_seconds(server: Server) -> float:
    """Of a step's groups."""
    for prompts in (1, PROMPTS):  # the first warms up
        began = time.monotonic()
        httpx.post(f"{server.url}/darts/v1/rollouts", json=rollout(prompts), timeout=None).raise_for_status()
    return time.monotonic() - began


def rollout(prompts: int) -> dict[str, Any]:
    return {
        "prompts": [{"text": "7a-5b*4>"}] * prompts,
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": MOST_TOKENS},
    }


@contextmanager
def sender(folder: Path) -> Iterator[str]:
    """The address at which the files of ``folder`` can be pulled."""
    with ThreadingHTTPServer((HERE, 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://{HERE}:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


class Quiet(SimpleHTTPRequestHandler):
    """Sends files, and says nothing of it."""

    def log_message(self, format: str, *args: object) -> None: ...


def in_a_row(server: Server, updates: int, groups: int) -> Iterator[str]:
    """Of each rule a line of the table."""
    weights = load_file(MODEL / WEIGHTS)
    sets = [save(weights), save({name: tensor * 1.001 for name, tensor in weights.items()})]
    for rule, callers in (("finish", 0), *((rule, groups) for rule in RULES)):
        asyncio.run(row(server, sets, rule, WARM_UP, callers))
        before = memory(server)
        seen = asyncio.run(row(server, sets, rule, updates, callers))
        api, engine = (after - then for after, then in zip(memory(server), before, strict=True))
        counts = f"{seen.groups} | {seen.mixed} | {seen.lost}"
        times = f"{statistics.median(seen.seconds):.3f} s | {max(seen.seconds):.3f} s"
        name = f"`{rule}`" if callers else "nobody calls"
        yield f"| {name} | {counts} | {times} | {api:+.0f} MB | {engine:+.0f} MB |"


async def row(server: Server, sets: Sequence[bytes], rule: str, updates: int, groups: int) -> Row:
    """Callers ask for one group after the other while updates follow each other."""
    seen, over = Row(), asyncio.Event()
    body = rollout(prompts=1)

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


def memory(server: Server) -> tuple[float, float]:
    """Megabytes of the API process, and of its engine."""
    process = psutil.Process(server.process.pid)
    engine = sum(child.memory_info().rss for child in process.children(recursive=True))
    return process.memory_info().rss / 1e6, engine / 1e6


if __name__ == "__main__":
    sys.exit(main())
