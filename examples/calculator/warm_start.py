"""Train the policy that reinforcement learning starts with: it calls the calculator, but not always, and with errors.

Run from the repository root::

    OMP_NUM_THREADS=1 python -m examples.calculator.warm_start --out examples/calculator/model

Model, curriculum and optimizer are those of ``examples/tiny_rl/warm_start.py``. On one thread the result depends only
on the seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import Qwen3ForCausalLM

from examples.calculator.demonstrations import STANDARD, draw_batch
from examples.tiny_rl.batches import Sample
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.warm_start import Recipe, save, train_on

STEPS = 700


def train(recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """Train a new policy on demonstrations."""
    tokenizer = build_tokenizer()

    def draw(rng: Random, short: bool, clean: bool) -> list[Sample]:
        return draw_batch(rng, tokenizer, STANDARD, recipe.batch_tokens, short=short, clean=clean)

    return train_on(draw, recipe, seed)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to save the model into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    # One thread is steadier than two on a small machine, and gives the same bits each time.
    torch.set_num_threads(1)
    save(train(Recipe(arguments.steps), arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
