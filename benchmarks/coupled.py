"""What coupled sampling costs, and what reused streams bring.

    python -m benchmarks.coupled cost       # us to sample a row, by vLLM's sampler and by ours, for two vocabularies
    python -m benchmarks.coupled streams    # decode steps of three epochs with real updates of the weights between them

``streams`` answers 16 problems eight times in each epoch. Each epoch trains the tiny model by GRPO: first on these
answers, then on the answers to other problems. Arms: plain drafts, and ``--reuse-streams``.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter

import httpx
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.speculation import GROUP_SIZE, decode_steps
from benchmarks.tables import markdown, quartiles
from darts_client import Client, Trajectory
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, MODEL, Server, serving
from examples.tiny_rl.grpo import Learner, Trained, advantages
from examples.tiny_rl.tokenizer import build_tokenizer

VOCABULARIES = (48, 49_152)
ROWS = (1, 32, 128)
REPETITIONS = 25
ARMS = {"plain": (), "reused": ("--reuse-streams",)}
EPOCHS = 3
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PROBLEMS = 16
LEARNING_RATE = 5e-5
"""A quarter of the example's: with it the model is nearly deterministic after 16 updates, and any draft is right."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.coupled", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["cost", "streams"])
    parser.add_argument("--updates", nargs="+", type=int, default=[1, 4], help="updates an epoch (default: 1 4)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="problems of a run (default: 1 2 3)")
    options = parser.parse_args(argv)
    if options.part == "cost":
        print(cost())
    else:
        print(streams(options.updates, options.seeds))
    return 0


# --- cost --------------------------------------------------------------------------


def cost() -> str:
    """Return a table of microseconds a row, from logits to tokens, on one thread."""
    from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample, random_sample

    from darts_server.vllm.engine_core.coupled import StepStreams, sample_after_drafts

    torch.set_num_threads(1)
    rows = []
    for size in VOCABULARIES:
        for count in ROWS:
            logits = torch.randn(count, size)
            numbers = np.arange(count)
            streams = StepStreams(numbers.astype(np.uint64), numbers, np.zeros(count, np.int64))

            def sample_vllm(logits: torch.Tensor = logits) -> torch.Tensor:
                return random_sample(logits.softmax(-1), {})

            def sample_coupled(logits: torch.Tensor = logits, streams: StepStreams = streams) -> torch.Tensor:
                return sample_after_drafts(logits.softmax(-1), streams)

            def sample_vllm_compiled(logits: torch.Tensor = logits) -> torch.Tensor:
                return compiled_random_sample(logits)

            samplers = (sample_vllm_compiled, sample_coupled, sample_vllm)
            columns = [measure_microseconds(sampler) for sampler in samplers]
            with torch.compiler.set_stance("force_eager"):
                columns.append(measure_microseconds(sample_coupled))
            cells = [quartiles([microseconds / count for microseconds in column], 1) for column in columns]
            rows.append([f"{size:,}", str(count), *cells])
    return markdown(["vocabulary", "rows", "vLLM's, compiled", "coupled, compiled", "vLLM's", "coupled"], rows)


def measure_microseconds(run: Callable[[], torch.Tensor]) -> list[float]:
    # The first call compiles.
    run()
    times = []
    for _ in range(REPETITIONS):
        begin = perf_counter()
        run()
        times.append(1e6 * (perf_counter() - begin))
    return times


# --- reused streams ----------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """``kept``: mean share of an answer that begins the answer of the same candidate in the epoch before.

    ``accepted``: number of drafted tokens among the ``tokens``.
    """

    steps: float
    tokens: int
    accepted: float
    reward: float
    kept: float


def streams(updates: Sequence[int], seeds: Sequence[int]) -> str:
    """Return a table of each epoch of both arms."""
    rows = []
    with tqdm(total=len(updates) * len(seeds) * len(ARMS), unit="run") as bar:
        for count in updates:
            runs: dict[str, list[list[Epoch]]] = {}
            for seed in seeds:
                for arm in ARMS:
                    runs.setdefault(arm, []).append(train(arm, count, seed))
                    bar.update()
            for number in range(EPOCHS):
                for arm in ARMS:
                    epochs = [run[number] for run in runs[arm]]
                    rows.append(
                        [
                            str(count),
                            str(number + 1),
                            arm,
                            ", ".join(f"{each.steps:.0f}" for each in epochs),
                            ", ".join(f"{each.tokens / (each.tokens - each.accepted):.1f}" for each in epochs),
                            f"{fmean(each.tokens for each in epochs):,.0f}",
                            f"{fmean(each.reward for each in epochs):.3f}",
                            f"{fmean(each.kept for each in epochs):.2f}",
                        ]
                    )
    head = ["updates an epoch", "epoch", "streams", "decode steps", "tokens a sequence and step", "tokens", "reward"]
    return markdown([*head, "kept"], rows)


def train(arm: str, updates: int, seed: int) -> list[Epoch]:
    rng = Random(seed)
    problems = [sample_problem(rng) for _ in range(PROBLEMS)]
    flags = ("--sampling", "coupled", "--speculate", "auto", *ARMS[arm])
    weights = Path(f"out/coupled/{arm}.safetensors")
    epochs: list[Epoch] = []
    previous_answers: list[tuple[int, ...]] = []
    with serving(DARTS, weights.with_suffix(".log"), *flags) as server, Client(server.url) as client:
        learner = Learner(MODEL, LEARNING_RATE)
        for _ in range(EPOCHS):
            steps_before = decode_steps(server)
            accepted_before = metric(server, ACCEPTED)
            groups = answer(client, problems)
            answers = [trajectory.token_ids for group in groups for trajectory in group]
            rewards = [
                reward(problem, trajectory.text)
                for problem, group in zip(problems, groups, strict=True)
                for trajectory in group
            ]
            epoch = Epoch(
                steps=decode_steps(server) - steps_before,
                tokens=sum(map(len, answers)),
                accepted=metric(server, ACCEPTED) - accepted_before,
                reward=fmean(rewards),
                kept=fmean(map(kept_share, answers, previous_answers)) if previous_answers else 0.0,
            )
            epochs.append(epoch)
            previous_answers = answers
            # The first update trains on this epoch's answers, and the others on the answers to new problems.
            trained_problems = problems
            for number in range(updates):
                if number:
                    trained_problems = [sample_problem(rng) for _ in range(PROBLEMS)]
                    groups = answer(client, trained_problems)
                learner.update(list(to_train(trained_problems, groups)))
                weights.write_bytes(learner.weights())
                client.weights.push(weights)
    return epochs


def answer(client: Client, problems: Sequence[Problem]) -> list[Sequence[Trajectory]]:
    batch = client.rollouts(
        [problem.prompt for problem in problems],
        group_size=GROUP_SIZE,
        max_tokens=MAX_RESPONSE_TOKENS,
        policy="off",
        logprobs=True,
    )
    return [group.trajectories for group in sorted(batch, key=lambda group: group.number)]


def metric(server: Server, name: str) -> float:
    """Return the value of a counter of vLLM's, or 0 before it counts anything."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def kept_share(tokens: Sequence[int], previous_tokens: Sequence[int]) -> float:
    num_kept = 0
    for token, previous_token in zip(tokens, previous_tokens, strict=False):
        if token != previous_token:
            break
        num_kept += 1
    return num_kept / len(tokens)


def to_train(problems: Sequence[Problem], groups: Sequence[Sequence[Trajectory]]) -> Iterable[Trained]:
    tokenizer = build_tokenizer()
    for problem, group in zip(problems, groups, strict=True):
        prompt = tokenizer.encode(problem.prompt)
        rewards = [reward(problem, each.text) for each in group]
        for each, advantage in zip(group, advantages(rewards), strict=True):
            yield Trained([*prompt, *each.token_ids], len(prompt), each.logprobs or (), advantage)


if __name__ == "__main__":
    sys.exit(main())
