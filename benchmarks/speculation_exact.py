"""Compare answers with drafts and without: what is sampled must be the same, however the requests are made.

Each situation has servers of its own flags. The same prompts are answered by a server without drafts and by a server
with drafts, and lengths, right answers, log-probs and first tokens are compared. The log-probs of the server with
drafts are also compared with a pass of transformers over the whole answers.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from benchmarks.tables import markdown
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward
from darts_server.offline.demo.server import MODEL, Server
from examples.tiny_rl.batches import Sample, collate, parts_of
from examples.tiny_rl.grpo import log_probs
from examples.tiny_rl.tokenizer import build_tokenizer

TIMEOUT_SECONDS = 600.0
LENGTHS = (1, 3, 10)
"""Tokens of the prefixes whose frequencies are compared."""
FEWEST = 10
"""Prefixes that were seen less often are counted together, as a chi-square test needs expected counts of about 5."""
FORCED = 512
"""Answers of each situation over which transformers passes."""
PREEMPTIONS = "vllm:num_preemptions_total"
ADAPTER = "adapter"
RANK = 4
SIZE_OF_ADAPTER = 0.035
"""Standard deviation of an adapter's matrices, which changes answers, but leaves the model able to calculate."""
ABORTED = 12
"""Requests that are aborted at the same time as other requests are answered."""
UPDATE_SECONDS = 0.3
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """``problem``: index of its prompt."""

    problem: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    right: float


@dataclass(frozen=True)
class Situation:
    """How answers are requested.

    Args:
        sampling: sampling parameters.
        way: `batch`, `choices` of vLLM's own route, a batch that is `resumed`, with `aborts` or `updates` meanwhile, or
            an `adapter`.
        flags: of both servers.
        group_size: answers to each prompt in a request.
        problems: number of prompts, or None for all.
        is_forced: whether the log-probs are of the model alone, so that transformers computes the same.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    way: str = "batch"
    flags: tuple[str, ...] = ()
    group_size: int = 8
    problems: int | None = None
    is_forced: bool = True


# Two prompts of the same length hardly fit into a step, so most prompts are split.
CHUNKS = ("--enable-chunked-prefill", "--max-num-seqs", "16", "--max-num-batched-tokens", "48")
# Blocks for little more than one text of the maximum length. So other texts are preempted.
FEW_BLOCKS = ("--block-size", "32", "--num-gpu-blocks-override", "16", "--max-num-seqs", "16")
PREFIXES = ("--block-size", "32", "--enable-prefix-caching")
LORA = ("--enable-lora", "--max-lora-rank", "8")
SITUATIONS: Mapping[str, Situation] = {
    "temperature 1": Situation(),
    "temperature .7": Situation({"temperature": 0.7}),
    "top_p .9": Situation({"top_p": 0.9}),
    "top_k 3": Situation({"top_k": 3}),
    "penalties": Situation({"presence_penalty": 0.5, "frequency_penalty": 0.3}),
    "repetition_penalty": Situation({"repetition_penalty": 1.2}),
    "min_tokens 8": Situation({"min_tokens": 8}),
    "stop string": Situation({"stop": ["="]}),
    "bad words": Situation({"bad_words": ["#"], "max_tokens": 40}),
    "regex": Situation({"structured_outputs": {"regex": "[0-9]{1,12}#[0-9]"}}, is_forced=False),
    "10 tokens": Situation({"max_tokens": 10}, group_size=128, problems=4),
    "n = 8, vLLM's route": Situation(way="choices"),
    "resumed": Situation(way="resumed"),
    "aborts meanwhile": Situation(way="aborts"),
    "updates meanwhile": Situation(way="updates"),
    "prefix cache": Situation(flags=PREFIXES),
    "chunked prefill": Situation(flags=CHUNKS),
    "preemption": Situation(flags=FEW_BLOCKS),
    "LoRA adapter": Situation(way="adapter", flags=LORA),
}

ServerOf = Callable[[str, Sequence[str]], AbstractContextManager[Server]]


# --- answers -----------------------------------------------------------------------


def answers_of(server: Server, situation: Situation, problems: Sequence[Problem], rounds: int) -> list[Answer]:
    """Answer all problems in each round."""
    problems = problems[: situation.problems]
    if situation.way == "adapter":
        push_adapter(server, adapter())
    answers: list[Answer] = []
    with meanwhile(server, situation.way, problems):
        for number in range(rounds):
            if situation.way in ("choices", "adapter"):
                answers += choices(server, situation, problems)
            else:
                is_last = number == rounds - 1
                answers += batch(server, situation, problems, number, is_last)
    return answers


def batch(
    server: Server, situation: Situation, problems: Sequence[Problem], round_number: int, is_last: bool
) -> list[Answer]:
    """Answer the problems in a batch. If it is resumed, some groups go on in the next batch, until the last batch."""
    body: dict[str, Any] = {
        "prompts": [
            {"text": problem.prompt, "key": f"{round_number}, {number}", "metadata": {"number": number}}
            for number, problem in enumerate(problems)
        ],
        "group_size": situation.group_size,
        "sampling": {"max_tokens": MAX_RESPONSE_TOKENS, "logprobs": True, **situation.sampling},
        "policy": {"name": "off"},
    }
    if situation.way == "resumed":
        body |= {"carried": True, "carry": "resume"}
        if not is_last:
            body["num_groups"] = len(problems) if round_number else len(problems) // 2
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=TIMEOUT_SECONDS)
    return [
        graded(
            problems, group["metadata"]["number"], trajectory["token_ids"], trajectory["logprobs"], trajectory["text"]
        )
        for group in answer.raise_for_status().json()["groups"]
        for trajectory in group["trajectories"]
    ]


def choices(server: Server, situation: Situation, problems: Sequence[Problem]) -> list[Answer]:
    """Answer the problems by a request to vLLM's own route."""
    model = "tiny" if situation.way == "choices" else ADAPTER
    body = {
        "model": f"{model}:raw",
        "prompt": [problem.prompt for problem in problems],
        "n": situation.group_size,
        "max_tokens": MAX_RESPONSE_TOKENS,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        **situation.sampling,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_SECONDS).raise_for_status()
    return [
        graded(
            problems,
            choice["index"] // situation.group_size,
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            choice["text"],
        )
        for choice in answer.json()["choices"]
    ]


def graded(
    problems: Sequence[Problem], number: int, token_ids: Sequence[int], logprobs: Sequence[float], text: str
) -> Answer:
    return Answer(number, tuple(token_ids), tuple(logprobs), reward(problems[number], text))


@contextmanager
def meanwhile(server: Server, way: str, problems: Sequence[Problem]) -> Iterator[None]:
    """Abort requests, or update the weights, while the block runs."""
    ended = Event()
    errors: list[Exception] = []
    weights = (MODEL / "model.safetensors").read_bytes()

    def update() -> None:
        while not ended.wait(UPDATE_SECONDS):
            params = {"rule": "keep"}
            httpx.put(f"{server.url}/darts/v1/weights", content=weights, params=params, timeout=60).raise_for_status()

    def abort() -> None:
        rng = Random(0)
        body = {"model": "tiny:raw", "n": ABORTED, "max_tokens": MAX_RESPONSE_TOKENS, "stream": True}
        while not ended.is_set():
            body["prompt"] = rng.choice(problems).prompt
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                for _ in zip(range(rng.randint(1, 40)), answer.iter_lines(), strict=False):
                    pass

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            errors.append(error)

    thread = None
    if way in ("updates", "aborts"):
        thread = Thread(target=run, args=[update if way == "updates" else abort])
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread is not None:
            thread.join()
    if errors:
        raise errors[0]


# --- an adapter --------------------------------------------------------------------


def adapter() -> dict[str, torch.Tensor]:
    """Return the matrices of a random adapter, of all projections."""
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            tensors[f"{layer}.lora_A.weight"] = SIZE_OF_ADAPTER * torch.randn(RANK, inputs, generator=random)
            tensors[f"{layer}.lora_B.weight"] = SIZE_OF_ADAPTER * torch.randn(outputs, RANK, generator=random)
    return tensors


def push_adapter(server: Server, tensors: dict[str, torch.Tensor]) -> None:
    params = {"config": json.dumps({"r": RANK, "lora_alpha": 2 * RANK})}
    url = f"{server.url}/darts/v1/weights/lora/{ADAPTER}"
    httpx.put(url, content=save(tensors), params=params, timeout=60).raise_for_status()


def merge(model: Qwen3ForCausalLM, tensors: Tensors) -> None:
    """Add the adapter to the model's weights."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, up in tensors.items():
            if ".lora_B" in name:
                down = tensors[name.replace("lora_B", "lora_A")]
                weight = weights[name.removeprefix("base_model.model.").replace(".lora_B", "")]
                weight.add_(2.0 * up @ down)


# --- comparisons -------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Answers with drafts and without in a situation.

    ``scores``: differences in standard errors: of length, right answers, log-prob, and prefixes of `LENGTHS`. ``gap``:
    largest difference from the log-probs of transformers in nats, or None if they are not the same. ``preemptions``: of
    requests with drafts.
    """

    name: str
    answers: tuple[int, int]
    scores: Sequence[float]
    gap: float | None
    preemptions: float


def compare(
    names: Sequence[str], method: str, problems: Sequence[Problem], rounds: int, server_of: ServerOf
) -> list[Comparison]:
    """Compare answers in each situation. Situations with the same flags share their servers."""
    comparisons = []
    with tqdm(total=2 * len(names), unit="situation") as bar:
        for flags in dict.fromkeys(SITUATIONS[name].flags for name in names):
            chosen = [name for name in names if SITUATIONS[name].flags == flags]
            drawn: dict[tuple[str, str], list[Answer]] = {}
            preemptions: dict[str, float] = {}
            for each in ("none", method):
                with server_of(each, flags) as server:
                    for name in chosen:
                        before = server.metric(PREEMPTIONS)
                        drawn[each, name] = answers_of(server, SITUATIONS[name], problems, rounds)
                        preemptions[name] = server.metric(PREEMPTIONS) - before
                        bar.update()
            for name in chosen:
                base = drawn["none", name]
                answers = drawn[method, name]
                scores = [
                    difference(base, answers, lambda answer: len(answer.token_ids)),
                    difference(base, answers, lambda answer: answer.right),
                    difference(base, answers, lambda answer: float(np.mean(answer.logprobs))),
                    *(prefixes(base, answers, length) for length in LENGTHS),
                ]
                gap = None
                if SITUATIONS[name].is_forced:
                    gap = forced_gap(SITUATIONS[name], problems, answers)
                comparisons.append(Comparison(name, (len(base), len(answers)), scores, gap, preemptions[name]))
    return comparisons


def table(comparisons: Sequence[Comparison]) -> str:
    """Format comparisons, and the sum of their squared scores."""
    rows = []
    for each in comparisons:
        scores = [f"{score:+.1f}" for score in each.scores]
        gap = "" if each.gap is None else f"{each.gap:.1e}"
        rows.append([each.name, "{:,}, {:,}".format(*each.answers), *scores, gap, f"{each.preemptions:.0f}"])
    head = ["situation", "answers", "length (z)", "right (z)", "log-prob (z)"]
    head += [f"first {length} (z)" for length in LENGTHS]
    head += ["largest gap (nats)", "preemptions"]
    squares = [score**2 for each in comparisons for score in each.scores]
    return f"{markdown(head, rows)}\n\nSum of z² over {len(squares)} statistics: {sum(squares):.1f}"


def difference(base: Sequence[Answer], answers: Sequence[Answer], value: Callable[[Answer], float]) -> float:
    """Return the difference of means in standard errors. Prompts are the same, so only their samples vary."""
    total = 0.0
    variance = 0.0
    for problem in {answer.problem for answer in base}:
        one, other = ([value(answer) for answer in group if answer.problem == problem] for group in (base, answers))
        total += float(np.mean(other) - np.mean(one))
        variance += float(np.var(one, ddof=1) / len(one) + np.var(other, ddof=1) / len(other))
    return total / sqrt(variance) if variance else 0.0


def prefixes(base: Sequence[Answer], answers: Sequence[Answer], length: int) -> float:
    """Compare the frequencies of the first tokens by a chi-square test, and return it as a z-score."""
    counts = [Counter((answer.problem, answer.token_ids[:length]) for answer in group) for group in (base, answers)]
    statistic = 0.0
    degrees = 0
    for problem in {answer.problem for answer in base}:
        pairs = []
        rest = np.zeros(2)
        for key in counts[0].keys() | counts[1].keys():
            if key[0] != problem:
                continue
            pair = np.array([count[key] for count in counts], float)
            if pair.sum() < FEWEST:
                rest += pair
            else:
                pairs.append(pair)
        if rest.sum() >= FEWEST:
            pairs.append(rest)
        if len(pairs) < 2:
            continue
        observed = np.array(pairs)
        expected = observed.sum(axis=1, keepdims=True) * observed.sum(axis=0) / observed.sum()
        statistic += float(((observed - expected) ** 2 / expected).sum())
        degrees += len(pairs) - 1
    return (statistic - degrees) / sqrt(2 * degrees) if degrees else 0.0


def forced_gap(situation: Situation, problems: Sequence[Problem], answers: Sequence[Answer]) -> float:
    """Return the largest difference, in nats, between the server's log-probs and those of transformers."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if situation.way == "adapter":
        merge(model, adapter())
    tokenizer = build_tokenizer()
    samples = []
    for answer in answers[:: max(1, len(answers) // FORCED)]:
        prompt = tokenizer.encode(problems[answer.problem].prompt)
        samples.append(Forced([*prompt, *answer.token_ids], len(prompt), answer.logprobs))
    gap = 0.0
    for part in parts_of(sorted(samples, key=lambda sample: len(sample.tokens))):
        with torch.no_grad():
            rows = log_probs(model, *collate(part))
        for sample, row in zip(part, rows, strict=True):
            start = sample.prompt_length - 1
            expected = row[start : start + len(sample.logprobs)]
            gap = max(gap, float((expected - torch.tensor(sample.logprobs)).abs().max()))
    return gap


@dataclass(frozen=True)
class Forced(Sample):
    """An answer, and the server's log-probs of its tokens."""

    logprobs: Sequence[float]
