"""Compare serving with and without speculative decoding: what is sampled must be the same, and steps must be fewer.

    python -m benchmarks.speculation exact             # lengths, answers, first tokens, prefixes, log-probs
    python -m benchmarks.speculation speed             # decode steps and seconds, epoch by epoch
    python -m benchmarks.speculation paired            # the same, of servers that run side by side and take turns
    python -m benchmarks.speculation speed --methods auto ngram
    python -m benchmarks.speculation train             # the same with real updates: `speculation_training`
    python -m benchmarks.speculation train --report    # the tables of the log
    python -m benchmarks.speculation words             # `speculation_words`: a real language model, word problems

Methods: ``auto`` is ``--speculate auto``, ``ngram`` is vLLM's own with 4 tokens in every step, ``fixed`` is our drafter
with 4 tokens in every step. Servers run the tiny model, but for ``words``, and answer the same prompts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.smollm2 import model_folder
from benchmarks.speculation_exact import SITUATIONS, compare, table
from benchmarks.speculation_training import EPOCHS, SIZES, WAYS, answers_table, cost_table, read, train
from benchmarks.speculation_words import FLAGS as LANGUAGE_FLAGS
from benchmarks.speculation_words import words
from benchmarks.tables import markdown, quartiles
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, Server, serving

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FIXED = {
    "method": "custom_class",
    "model": "benchmarks.fixed_drafts.FixedDrafter",
    "num_speculative_tokens": 4,
}
METHODS: Mapping[str, Sequence[str]] = {
    "none": [],
    "auto": ["--speculate", "auto"],
    "ngram": ["--speculative-config", json.dumps(NGRAM)],
    "fixed": ["--speculative-config", json.dumps(FIXED)],
}
GROUP_SIZE = 8


@dataclass(frozen=True)
class Answer:
    """``problem``: index of its prompt."""

    problem: int
    token_ids: tuple[int, ...]
    right: float
    logprob: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.speculation", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["exact", "speed", "paired", "train", "words"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS)[1:], default=["auto"], help="(default: auto)")
    names = list(SITUATIONS)
    names_help = f"of: {'; '.join(names)} (default: all)"
    parser.add_argument("--situations", nargs="+", choices=names, default=names, metavar="NAME", help=names_help)
    parser.add_argument("--prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="groups of 8 of each prompt, or epochs (default: 8)")
    training = parser.add_argument_group("train")
    training.add_argument(
        "--sizes", nargs="+", type=int, choices=list(SIZES), default=list(SIZES), help="(default: all)"
    )
    training.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="(default: all)")
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    training.add_argument("--epochs", type=int, default=EPOCHS, help="(default: %(default)s)")
    training.add_argument("--separate", action="store_true", help="a trainer for each server")
    training.add_argument(
        "--log", type=Path, default=Path("out/speculation/train.jsonl"), help="(default: %(default)s)"
    )
    training.add_argument("--report", action="store_true", help="run nothing; print the tables of --log")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7], help="of words (default: 1 .7)")
    options = parser.parse_args(argv)
    if options.part == "train":
        if not options.report:
            sizes = [SIZES[prompts] for prompts in options.sizes]
            train(
                sizes,
                options.ways,
                options.seeds,
                options.methods,
                server_of,
                options.log,
                separate=options.separate,
                epochs=options.epochs,
            )
        lines = read(options.log)
        print(f"{cost_table(lines)}\n\n{answers_table(lines)}")
        return 0
    if options.part == "words":
        print(words(lambda: language_server(options.methods[0]), options.temperatures, options.prompts, options.epochs))
        return 0
    rng = Random(0)
    problems = [sample_problem(rng) for _ in range(options.prompts)]
    methods = ["none", *options.methods]
    if options.part == "paired":
        print(paired(problems, options.rounds))
    elif options.part == "exact":
        print(table(compare(options.situations, options.methods[0], problems, options.rounds, server_of)))
    else:
        print(speed(problems, methods, options.rounds))
    return 0


@contextmanager
def server_of(method: str, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server with a kind of drafts."""
    with serving(DARTS, Path(f"out/speculation/{method}.log"), *METHODS[method], *flags) as server:
        yield server


def language_server(method: str) -> AbstractContextManager[Server]:
    """Run a server of SmolLM2 with a kind of drafts."""
    command = ("darts_server", "serve", str(model_folder()))
    return serving(command, Path("out/speculation/words.log"), *LANGUAGE_FLAGS, *METHODS[method])


def draw(server: Server, problems: Sequence[Problem], sampling: Mapping[str, Any]) -> list[Answer]:
    """Answer each problem eight times, in a single batch."""
    body = {
        "prompts": [{"text": problem.prompt} for problem in problems],
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": MAX_RESPONSE_TOKENS, "logprobs": True, **sampling},
        "policy": {"name": "off"},
    }
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=600).raise_for_status().json()
    return [
        Answer(
            group["number"],
            tuple(trajectory["token_ids"]),
            reward(problems[group["number"]], trajectory["text"]),
            float(np.mean(trajectory["logprobs"])),
        )
        for group in answer["groups"]
        for trajectory in group["trajectories"]
    ]


# --- speed -------------------------------------------------------------------------


def decode_steps(server: Server) -> float:
    """Return the number of decode steps so far."""
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("darts_decode_steps_total"):
            return float(line.split()[-1])
    raise LookupError("darts_decode_steps_total")


def speed(problems: Sequence[Problem], methods: Sequence[str], epochs: int) -> str:
    """Return a table of steps and seconds of each epoch, relative to no speculation in the same epoch."""
    measured: dict[str, list[tuple[float, float, float]]] = {}
    with tqdm(total=len(methods) * epochs, unit="epoch") as bar:
        for method in methods:
            with server_of(method) as server:
                draw(server, problems[:1], {"max_tokens": 2})
                for _ in range(epochs):
                    before = decode_steps(server)
                    begin = perf_counter()
                    answers = draw(server, problems, {})
                    seconds = perf_counter() - begin
                    length = float(np.mean([len(answer.token_ids) for answer in answers]))
                    measured.setdefault(method, []).append((decode_steps(server) - before, seconds, length))
                    bar.update()
    rows = []
    for method in methods[1:]:
        for first, last in ((0, 1), (1, 2), (2, epochs)):
            pairs = list(zip(measured["none"][first:last], measured[method][first:last], strict=True))
            label = f"{first + 1}" if last == first + 1 else f"{first + 1} to {last}"
            rows.append(
                [
                    method,
                    label,
                    quartiles([ours[0] / base[0] for base, ours in pairs], 2),
                    quartiles([ours[1] / base[1] for base, ours in pairs], 2),
                    f"{np.mean([base[2] for base, _ in pairs]):.1f}, {np.mean([ours[2] for _, ours in pairs]):.1f}",
                ]
            )
    return markdown(["drafts", "epoch", "decode steps", "seconds", "length without, with"], rows)


# --- paired ------------------------------------------------------------------------

TURNS = ("auto 1", "none 1", "auto 2", "none 2", "auto 3", "none 3", "off 4", "none 4", "off 5", "none 5")
"""What answers all prompts, in order: the server that speculates, in its first three epochs and then switched off, and
a server without the flag."""
PAIRS = {
    "first epoch": ("auto 1", "none 1"),
    "second epoch": ("auto 2", "none 2"),
    "third epoch": ("auto 3", "none 3"),
    "third epoch, by off": ("auto 3", "off"),
    "off": ("off", "none"),
}


def cpu_seconds(server: Server) -> float:
    """Return the time that the processes of a server's engine have run."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(sum(child.cpu_times()[:2]) for child in children)


def measure(server: Server, problems: Sequence[Problem]) -> NDArray[np.float64]:
    """Return decode steps, seconds and seconds of the engine's processes for a thousand tokens."""
    steps = decode_steps(server)
    used = cpu_seconds(server)
    begin = perf_counter()
    answers = draw(server, problems, {})
    seconds = perf_counter() - begin
    tokens = sum(len(answer.token_ids) for answer in answers)
    spent = np.array([decode_steps(server) - steps, seconds, cpu_seconds(server) - used])
    return 1000 * spent / tokens


def paired(problems: Sequence[Problem], rounds: int) -> str:
    """Return a table of what speculation takes, relative to no speculation.

    In each round a new server that speculates and a new server without the flag answer the same prompts by turns. So a
    machine whose load changes slows both down.
    """
    measured: dict[str, list[NDArray[np.float64]]] = {turn: [] for turn in TURNS}
    with tqdm(total=rounds * len(TURNS), unit="batch") as bar:
        for _ in range(rounds):
            with server_of("none") as plain, server_of("auto") as server:
                for started in (plain, server):
                    draw(started, problems[:1], {"max_tokens": 2})
                for turn in TURNS:
                    if turn == "off 4":
                        url = f"{server.url}/darts/v1/policy"
                        httpx.patch(url, json={"speculate": "off"}, timeout=60).raise_for_status()
                    used = plain if turn.startswith("none") else server
                    measured[turn].append(measure(used, problems))
                    bar.update()

    means = {}
    for name in {name for pair in PAIRS.values() for name in pair}:
        turns = [measured[turn] for turn in TURNS if turn.startswith(name)]
        means[name] = np.mean(turns, axis=0)
    rows = []
    for label, (ours, base) in PAIRS.items():
        ratios = means[ours] / means[base]
        rows.append([label, *(quartiles(list(column), 2) for column in ratios.T)])
    return markdown(["", "decode steps", "seconds", "seconds of the engine's processes"], rows)


if __name__ == "__main__":
    sys.exit(main())
