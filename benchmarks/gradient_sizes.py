"""Measure how the squared gradient of a trajectory's log-probability grows with its length, on the tiny model.

    python -m benchmarks.gradient_sizes

`--roulette-loss token` takes it to be proportional to the length. Under `sequence`, each trajectory's loss is a mean
over its tokens, so that its gradient is divided by the length.
"""

import argparse
import sys
from collections.abc import Sequence
from math import sqrt
from random import Random
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from darts_server.demo.problems import sample_problem
from darts_server.demo.server import MODEL

SAMPLES = 8
MAX_TOKENS = 250
RANGES = ((1, 8), (8, 20), (20, 32), (32, 64), (64, 128), (128, MAX_TOKENS + 1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gradient_sizes", description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=100, help="of 8 samples each (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = measure(options.prompts)
    print("| tokens | trajectories | squared gradient | by its length |")
    print("|---|---|---|---|")
    for low, high in RANGES:
        found = [(length, square) for length, square in sizes if low <= length < high]
        if len(found) > 1:
            cells = [show([square for _, square in found]), show([square / length for length, square in found])]
            print(f"| {low} to {high - 1} | {len(found)} | {' | '.join(cells)} |")
    return 0


def measure(prompts: int) -> list[tuple[int, float]]:
    """Return the length and the squared gradient of each sampled trajectory."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)  # it has no dropout
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    eos = tokenizer.eos_token_id
    rng, sizes = Random(3), []
    for _ in range(prompts):
        prompt = torch.tensor([tokenizer(sample_problem(rng).prompt).input_ids] * SAMPLES)
        with torch.no_grad():
            rows = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=eos,
            )
        for row in rows:
            completion = row[prompt.shape[1] :].tolist()
            length = completion.index(eos) + 1 if eos in completion else len(completion)
            sizes.append((length, squared_gradient(model, row[: prompt.shape[1] + length], length)))
    return sizes


def squared_gradient(model: torch.nn.Module, ids: torch.Tensor, length: int) -> float:
    """Return the squared norm of the gradient of the log-probability of the last ``length`` tokens."""
    model.zero_grad()
    logprobs = model(ids[None, :-1]).logits[0, -length:].log_softmax(-1)
    logprobs.gather(-1, ids[-length:, None]).sum().backward()
    return sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)


def show(values: Sequence[float]) -> str:
    return f"{fmean(values):.0f} ± {stdev(values) / sqrt(len(values)):.0f}"


if __name__ == "__main__":
    sys.exit(main())
