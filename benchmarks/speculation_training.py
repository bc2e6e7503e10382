"""Train the tiny task by GRPO on answers that were sampled with drafts, beside servers without drafts.

In each step all servers get the same weights and the same prompts. The trainer learns from the answers of the first
server that has drafts. With ``separate`` each server has a trainer of its own, so that what is learned can be compared.
Three epochs of a pool of prompts are trained on, and each run has new servers with drafts, which know no answers.
Every step is a line of a log, and the tables need the log alone.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from tqdm import tqdm

from benchmarks.tables import markdown
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward
from darts_server.offline.demo.server import MODEL, Server
from examples.tiny_rl.grpo import Learner, Trained, advantages
from examples.tiny_rl.remote import STEPS_METRIC
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.train import endless, problems

GROUP_SIZE = 8
EPOCHS = 3
TIMEOUT_SECONDS = 600.0
BASE = "none"
LATE = 6
"""Steps at the end of a run whose right answers and lengths are compared."""


@dataclass(frozen=True)
class Way:
    """How a trainer requests the answers of a step.

    ``ahead``: prompts that are started in addition, and resumed in the next step. ``singles``: a request for each
    answer, all at once. ``named``: they name their group.
    """

    policy: str = "off"
    ahead: float = 0.0
    singles: bool = False
    named: bool = False


WAYS: Mapping[str, Way] = {
    "off": Way(),
    "uniform": Way(policy="uniform"),
    "carry-over": Way(ahead=0.5),
    "single requests": Way(singles=True),
    "named single requests": Way(singles=True, named=True),
}


@dataclass(frozen=True)
class Size:
    """Prompts of a step, and steps of an epoch."""

    prompts: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.prompts} x {GROUP_SIZE}"


SIZES: Mapping[int, Size] = {16: Size(16, 6), 64: Size(64, 2)}


@dataclass(frozen=True)
class Sampled:
    """An answer. ``stale``: number of its first tokens that older weights sampled."""

    number: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    right: float
    stale: int = 0


@dataclass(frozen=True)
class Line:
    """A step on one server. ``cpu_seconds``: of the process that computes the model. ``length``: mean, in tokens."""

    size: str
    way: str
    separate: bool
    seed: int
    step: int
    method: str
    decode_steps: float
    seconds: float
    cpu_seconds: float
    right: float
    right_error: float
    length: float
    length_error: float

    @property
    def run(self) -> tuple[str, str, bool, int]:
        return self.size, self.way, self.separate, self.seed


ServerOf = Callable[[str], AbstractContextManager[Server]]


def train(
    sizes: Sequence[Size],
    ways: Sequence[str],
    seeds: Sequence[int],
    methods: Sequence[str],
    server_of: ServerOf,
    log: Path,
    separate: bool = False,
    epochs: int = EPOCHS,
) -> None:
    """Run what the log does not have yet.

    Args:
        methods: kinds of drafts.
        server_of: starts the server of a kind of drafts, or of `BASE`.
    """
    torch.set_num_threads(1)  # the servers need the other core
    log.parent.mkdir(parents=True, exist_ok=True)
    done = {(*line.run, line.method) for line in read(log)}
    left = [
        (size, way, seed)
        for seed in seeds
        for size in sizes
        for way in ways
        if any((size.name, way, separate, seed, method) not in done for method in methods)
    ]
    with ExitStack() as stack:
        base = stack.enter_context(server_of(BASE))
        bar = stack.enter_context(tqdm(total=sum(size.steps * epochs for size, _, _ in left), unit="step"))
        for size, way, seed in left:
            with ExitStack() as own:
                servers = {BASE: base} | {method: own.enter_context(server_of(method)) for method in methods}
                lines = []
                for step in run(servers, size, way, seed, separate, epochs):
                    lines += step
                    bar.update()
            with log.open("a") as file:
                file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


def run(
    servers: Mapping[str, Server], size: Size, way: str, seed: int, separate: bool, epochs: int
) -> Iterator[list[Line]]:
    """Train, and yield each step's lines."""
    pool = problems(seed, size.prompts * size.steps)
    order = endless(len(pool), Random(seed))
    tokenizer = build_tokenizer()
    prompts = [tokenizer.encode(problem.prompt) for problem in pool]
    first = Learner(MODEL)
    learners = {method: Learner(MODEL) if separate else first for method in servers}
    teacher = next(method for method in servers if method != BASE)
    for step in range(size.steps * epochs):
        ahead = int(WAYS[way].ahead * size.prompts) if step == 0 else 0
        numbers = list(islice(order, size.prompts + ahead))
        lines = []
        batches = {}
        # In turns, so that what else runs on the machine slows all of them.
        for method in sorted(servers, key=lambda name: (name == BASE) != (step % 2 == 0)):
            server = servers[method]
            version = push(server, learners[method])
            before = Usage.of(server)
            answers = sample(server, WAYS[way], size, numbers, pool, prompts, f"{way}, {seed}, {step}", version)
            used = Usage.of(server) - before
            batches[method] = answers
            lengths = [len(answer.token_ids) for answer in answers]
            rights = [answer.right for answer in answers]
            lines.append(
                Line(
                    size.name,
                    way,
                    separate,
                    seed,
                    step,
                    method,
                    used.decode_steps,
                    used.seconds,
                    used.cpu_seconds,
                    float(np.mean(rights)),
                    within_error(answers, rights),
                    float(np.mean(lengths)),
                    within_error(answers, lengths),
                )
            )
        for method in servers if separate else [teacher]:
            learners[method].update(graded(batches[method], prompts))
        yield lines


def push(server: Server, learner: Learner) -> int:
    """Send the weights, and return their version."""
    answer = httpx.put(f"{server.url}/darts/v1/weights", content=learner.weights(), timeout=TIMEOUT_SECONDS)
    return int(answer.raise_for_status().json()["version"])


@dataclass(frozen=True)
class Usage:
    """Work of a server since its start."""

    decode_steps: float
    seconds: float
    cpu_seconds: float

    @classmethod
    def of(cls, server: Server) -> "Usage":
        cpu_seconds = 0.0
        # The engine's core is a child of the server, and the worker, which computes, is a child of the core.
        for core in psutil.Process(server.process.pid).children():
            for worker in core.children(recursive=True):
                times = worker.cpu_times()
                cpu_seconds += times.user + times.system
        return cls(server.metric(STEPS_METRIC), perf_counter(), cpu_seconds)

    def __sub__(self, before: "Usage") -> "Usage":
        return Usage(
            self.decode_steps - before.decode_steps,
            self.seconds - before.seconds,
            self.cpu_seconds - before.cpu_seconds,
        )


def sample(
    server: Server,
    way: Way,
    size: Size,
    numbers: Sequence[int],
    pool: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    name: str,
    version: int,
) -> list[Sampled]:
    """Return the answers of a step.

    Args:
        numbers: prompts that start, by their numbers in the pool.
        name: of the step, in the names of its groups.
        version: of the server's weights.
    """
    if way.singles:
        return asyncio.run(sample_singles(server, way, numbers, pool, prompts, name))
    body: dict[str, Any] = {
        "prompts": [{"token_ids": prompts[number], "metadata": {"number": number}} for number in numbers],
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": MAX_RESPONSE_TOKENS, "logprobs": True},
        "policy": {"name": way.policy},
    }
    if way.ahead:
        body |= {"num_groups": size.prompts, "carried": True, "carry": "resume"}
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT_SECONDS)
    found = []
    for group in answer.raise_for_status().json()["groups"]:
        number = group["metadata"]["number"]
        for trajectory in group["trajectories"]:
            stale = sum(count for of, count in trajectory["version_spans"] if of != version)
            right = reward(pool[number], trajectory["text"])
            found.append(Sampled(number, trajectory["token_ids"], trajectory["logprobs"], right, stale))
    return found


async def sample_singles(
    server: Server,
    way: Way,
    numbers: Sequence[int],
    pool: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    name: str,
) -> list[Sampled]:
    """Request each answer by itself, all at once."""
    limits = httpx.Limits(max_connections=None)

    async def one(client: httpx.AsyncClient, number: int) -> Sampled:
        headers = {"X-Darts-Group": f"id={name}, {number};size={GROUP_SIZE}"} if way.named else {}
        body = {"model": "tiny", "prompt": prompts[number], "temperature": 1.0, "max_tokens": MAX_RESPONSE_TOKENS}
        body |= {"logprobs": 0, "return_token_ids": True}
        answer = await client.post(f"{server.url}/v1/completions", json=body, headers=headers)
        [choice] = answer.raise_for_status().json()["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        return Sampled(number, choice["token_ids"], logprobs, reward(pool[number], choice["text"]))

    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:
        return await asyncio.gather(*(one(client, number) for number in numbers for _ in range(GROUP_SIZE)))


def graded(answers: Sequence[Sampled], prompts: Sequence[Sequence[int]]) -> list[Trained]:
    """Return all answers with GRPO's advantages."""
    trained = []
    for number, group in by_prompt(answers).items():
        prompt = prompts[number]
        for answer, advantage in zip(group, advantages([answer.right for answer in group]), strict=True):
            tokens = [*prompt, *answer.token_ids]
            trained.append(Trained(tokens, len(prompt), answer.logprobs, advantage, answer.stale))
    return trained


def by_prompt(answers: Sequence[Sampled]) -> dict[int, list[Sampled]]:
    groups: dict[int, list[Sampled]] = {}
    for answer in answers:
        groups.setdefault(answer.number, []).append(answer)
    return groups


def within_error(answers: Sequence[Sampled], values: Sequence[float]) -> float:
    """Return the standard error of a mean over answers to prompts that do not vary."""
    groups: dict[int, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        groups.setdefault(answer.number, []).append(value)
    variances = [np.var(group, ddof=1) * len(group) for group in groups.values() if len(group) > 1]
    return sqrt(float(np.sum(variances))) / len(answers)


# --- tables ------------------------------------------------------------------------


def read(log: Path) -> list[Line]:
    if not log.is_file():
        return []
    return [Line(**json.loads(line)) for line in log.read_text().splitlines()]


def cost_table(lines: Sequence[Line]) -> str:
    """Return what each epoch takes with drafts, relative to the same epoch without: mean over seeds, ± its error."""
    rows = []
    for size, way, separate, method in kinds(lines):
        chosen = [line for line in lines if (line.size, line.way, line.separate) == (size, way, separate)]
        steps = SIZES[int(size.split()[0])].steps
        cells = []
        epochs = max(line.step for line in chosen) // steps + 1
        for quantity in ("decode_steps", "cpu_seconds", "seconds"):
            for epoch in range(epochs):
                begin = epoch * steps
                # The first step of a new server also loads and compiles.
                if quantity != "decode_steps":
                    begin = max(begin, 1)
                cells.append(relative(chosen, method, quantity, range(begin, (epoch + 1) * steps)))
        label = f"{way}, two trainers" if separate else way
        rows.append([size, label, method, str(len({line.seed for line in chosen})), *cells])
    quantities = ("steps", "CPU", "seconds")
    head = ["size", "requests", "drafts", "seeds"]
    head += [f"{quantity}, epoch {epoch + 1}" for quantity in quantities for epoch in range(EPOCHS)]
    return markdown(head, rows)


def kinds(lines: Sequence[Line]) -> list[tuple[str, str, bool, str]]:
    """Return each size, way, separateness and method of drafts once."""
    return list(
        dict.fromkeys((line.size, line.way, line.separate, line.method) for line in lines if line.method != BASE)
    )


def relative(lines: Sequence[Line], method: str, quantity: str, steps: range) -> str:
    """Return the ratio of sums over an epoch: mean over seeds, and its standard error."""
    ratios = []
    for seed in sorted({line.seed for line in lines if line.method == method}):
        sums = dict.fromkeys((method, BASE), 0.0)
        for line in lines:
            if line.seed == seed and line.step in steps and line.method in sums:
                sums[line.method] += getattr(line, quantity)
        ratios.append(sums[method] / (sums[BASE] or float("nan")))
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    error = np.std(ratios, ddof=1) / sqrt(len(ratios))
    return f"{np.mean(ratios):.2f} ± {error:.2f}"


def answers_table(lines: Sequence[Line]) -> str:
    """Return right answers and lengths with and without drafts.

    With a common trainer the weights of both are the same in each step, so the errors are those of sampling, and all
    steps count. With two trainers the last steps count. With two trainers, and where the prompts of a step depend on
    which groups were complete first, the errors are over seeds.
    """
    rows = []
    for size, way, separate, method in kinds(lines):
        chosen = [line for line in lines if (line.size, line.way, line.separate) == (size, way, separate)]
        seeds = sorted({line.seed for line in chosen if line.method == method})
        last = max(line.step for line in chosen)
        cells = []
        for value in ("right", "length"):
            differences = []
            variance = 0.0
            means = {method: 0.0, BASE: 0.0}
            for seed in seeds:
                pair = {
                    name: [
                        line
                        for line in chosen
                        if line.seed == seed and line.method == name and (not separate or line.step > last - LATE)
                    ]
                    for name in means
                }
                mean = {name: float(np.mean([getattr(line, value) for line in of])) for name, of in pair.items()}
                for name in means:
                    means[name] += mean[name] / len(seeds)
                    errors = [getattr(line, f"{value}_error") for line in pair[name]]
                    variance += float(np.sum(np.square(errors))) / len(errors) ** 2 / len(seeds) ** 2
                differences.append(mean[method] - mean[BASE])
            error = sqrt(variance)
            if separate or WAYS[way].ahead:
                error = float(np.std(differences, ddof=1)) / sqrt(len(seeds)) if len(seeds) > 1 else float("nan")
            z = np.mean(differences) / error if error else 0.0
            cells.append(
                f"{means[BASE]:.3f}, {means[method]:.3f} ({np.mean(differences):+.3f} ± {error:.3f}, {z:+.1f})"
            )
        label = f"{way}, two trainers" if separate else way
        rows.append([size, label, method, str(len(seeds)), *cells])
    return markdown(
        ["size", "requests", "drafts", "seeds", "right: none, drafts (z)", "length: none, drafts (z)"], rows
    )
