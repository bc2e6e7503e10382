"""Compare serving with and without speculative decoding: what is sampled must be the same, and steps must be fewer.

    python -m benchmarks.speculation exact             # lengths, answers, first tokens, prefixes, log-probs
    python -m benchmarks.speculation speed             # decode steps and seconds, epoch by epoch
    python -m benchmarks.speculation speed --methods auto ngram

Methods: ``auto`` is ``--speculate auto``, ``coupled`` adds ``--sampling coupled``, ``ngram`` is vLLM's own with 4
tokens in every step. All servers run the tiny model, one after the other, and answer the same prompts.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import httpx
import numpy as np
from tqdm import tqdm

from benchmarks.tables import markdown, quartiles
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, Server, serving

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
METHODS: Mapping[str, Sequence[str]] = {
    "none": [],
    "auto": ["--speculate", "auto"],
    "coupled": ["--speculate", "auto", "--sampling", "coupled"],
    "ngram": ["--speculative-config", json.dumps(NGRAM)],
}
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "temperature 1": {},
    "temperature .7": {"temperature": 0.7},
    "top_p .9": {"top_p": 0.9},
    "top_k 3": {"top_k": 3},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "min_tokens 8": {"min_tokens": 8},
    "stop string": {"stop": ["="]},
    "bad words": {"bad_words": ["#"], "max_tokens": 40},
    "regex": {"structured_outputs": {"regex": "[0-9]{1,12}#[0-9]"}},
}
PREFIX = 3
"""Tokens of the prefixes whose frequencies are compared."""
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
    parser.add_argument("part", choices=["exact", "speed"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS)[1:], default=["auto"], help="(default: auto)")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING), help="(default: all)")
    parser.add_argument("--prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="groups of 8 of each prompt, or epochs (default: 8)")
    options = parser.parse_args(argv)
    rng = Random(0)
    problems = [sample_problem(rng) for _ in range(options.prompts)]
    methods = ["none", *options.methods]
    if options.part == "exact":
        print(exactness(problems, methods, options.sampling, options.rounds))
    else:
        print(speed(problems, methods, options.rounds))
    return 0


@contextmanager
def server_of(method: str):  # type: ignore[no-untyped-def]
    with serving(DARTS, Path(f"out/speculation/{method}.log"), *METHODS[method]) as server:
        yield server


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


# --- exactness ---------------------------------------------------------------------


def exactness(problems: Sequence[Problem], methods: Sequence[str], names: Sequence[str], rounds: int) -> str:
    """Return a table of what was sampled under each method, and how many errors it differs from no speculation."""
    drawn: dict[tuple[str, str], list[Answer]] = {}
    with tqdm(total=len(methods) * len(names) * rounds, unit="batch") as bar:
        for method in methods:
            with server_of(method) as server:
                for name in names:
                    answers = drawn.setdefault((method, name), [])
                    for _ in range(rounds):
                        answers += draw(server, problems, SAMPLING[name])
                        bar.update()
    rows = []
    for name in names:
        base = drawn["none", name]
        for method in methods[1:]:
            answers = drawn[method, name]
            rows.append(
                [
                    name,
                    method,
                    f"{len(answers):,}",
                    difference(base, answers, lambda answer: len(answer.token_ids)),
                    difference(base, answers, lambda answer: answer.right),
                    difference(base, answers, lambda answer: answer.logprob),
                    prefixes(base, answers),
                ]
            )
    head = ["sampling", "drafts", "answers", "length (z)", "right (z)", "log-prob (z)", f"first {PREFIX} tokens (z)"]
    return markdown(head, rows)


def difference(base: Sequence[Answer], answers: Sequence[Answer], value: Any) -> str:
    """Return both means, and their difference in standard errors. Prompts are the same, so only their samples vary."""
    means = []
    errors = []
    for group in (base, answers):
        by_problem: dict[int, list[float]] = {}
        for answer in group:
            by_problem.setdefault(answer.problem, []).append(value(answer))
        means.append(float(np.mean([np.mean(values) for values in by_problem.values()])))
        errors.append(
            float(np.mean([np.var(values) / len(values) for values in by_problem.values()])) / len(by_problem)
        )
    error = sqrt(sum(errors))
    z = (means[1] - means[0]) / error if error else 0.0
    return f"{means[0]:.3g}, {means[1]:.3g} ({z:+.1f})"


def prefixes(base: Sequence[Answer], answers: Sequence[Answer]) -> str:
    """Compare the frequencies of prefixes by a chi-square test, as a z-score. Rare prefixes count together."""
    counts = [Counter((answer.problem, answer.token_ids[:PREFIX]) for answer in group) for group in (base, answers)]
    statistic = 0.0
    cells = 0
    problems = {problem for count in counts for problem, _ in count}
    for problem in problems:
        pairs = []
        rest = [0, 0]
        for key in {key for count in counts for key in count if key[0] == problem}:
            pair = [count[key] for count in counts]
            if sum(pair) < 10:
                rest = [rest[0] + pair[0], rest[1] + pair[1]]
            else:
                pairs.append(pair)
        if sum(rest) >= 10:
            pairs.append(rest)
        totals = [sum(pair[side] for pair in pairs) for side in range(2)]
        if len(pairs) < 2 or not all(totals):
            continue
        for pair in pairs:
            for side in range(2):
                expected = sum(pair) * totals[side] / sum(totals)
                statistic += (pair[side] - expected) ** 2 / expected
        cells += len(pairs) - 1
    z = (statistic - cells) / sqrt(2 * cells) if cells else 0.0
    return f"chi2 {statistic:.0f} of {cells} ({z:+.1f})"


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


if __name__ == "__main__":
    sys.exit(main())
