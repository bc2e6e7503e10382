"""Train the policy that reinforcement learning starts with.

Run from the repository root::

    python -m examples.tiny_rl.warm_start --out darts_server/offline/demo/model

Supervised training on demonstrations with a curriculum: short chains first, then all chains without errors, then
demonstrations with the variant's verbosity. Without the curriculum a model of this size does not learn the arithmetic
in this time. On one thread the result depends only on the seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)
from tqdm import trange
from transformers import (
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.tiny_rl.batches import IGNORED, Sample, collate, draw_batch, parts_of
from examples.tiny_rl.demonstrations import VARIANTS, Variant
from examples.tiny_rl.tokenizer import EOS_ID, PAD_ID, VOCABULARY_SIZE, build_tokenizer

MAX_LENGTH = 320
"""Positions. Prompt and response take at most 285."""


@dataclass(frozen=True)
class Recipe:
    """Numbers of the training run."""

    steps: int
    batch_tokens: int = 3000
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    short_until: float = 0.20
    """Share of the steps with easy problems only."""
    clean_until: float = 0.55
    """Share of the steps with clean demonstrations only."""


Draw = Callable[[Random, bool, bool], list[Sample]]
"""Draws a batch, sorted from short to long: only short problems or all, only clean demonstrations or all."""


def build_model() -> Qwen3ForCausalLM:
    """Return the untrained policy: 451,648 parameters in float32."""
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def warmup_then_cosine(optimizer: Optimizer, recipe: Recipe) -> LRScheduler:
    """Return the learning-rate schedule: linear up, then a cosine down to zero."""
    warmup = recipe.warmup_steps
    parts: list[LRScheduler] = [
        LinearLR(optimizer, 1 / warmup, total_iters=warmup),
        CosineAnnealingLR(optimizer, recipe.steps - warmup),
    ]
    return SequentialLR(optimizer, parts, milestones=[warmup])


def summed_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy in nats, summed over labels [samples, positions]."""
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def train(variant: Variant, recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """Train a new policy on demonstrations of the given variant."""
    tokenizer = build_tokenizer()

    def draw(rng: Random, short: bool, clean: bool) -> list[Sample]:
        return draw_batch(rng, tokenizer, variant, recipe.batch_tokens, short=short, clean=clean)

    return train_on(draw, recipe, seed)


def train_on(draw: Draw, recipe: Recipe, seed: int) -> Qwen3ForCausalLM:
    """Train a new policy on batches of demonstrations."""
    torch.manual_seed(seed)
    rng = Random(seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98))
    schedule = warmup_then_cosine(optimizer, recipe)
    progress = trange(recipe.steps, desc="warm start", unit="step")
    for step in progress:
        short = step < recipe.short_until * recipe.steps
        clean = step < recipe.clean_until * recipe.steps
        samples = draw(rng, short, clean)
        targets = sum(sample.num_targets for sample in samples)
        total = 0.0
        for part in parts_of(samples):
            loss = summed_loss(model, *collate(part)) / targets
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.set_postfix(loss=f"{total:.3f}")
    return model


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write weights, configuration and tokenizer for vLLM and transformers."""
    # vLLM reads default sampling parameters from this file, so it has only the end of sequence.
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)


def main() -> None:
    """Train one variant and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="standard")
    parser.add_argument("--out", type=Path, required=True, help="folder to save the model into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the variant's")
    arguments = parser.parse_args()
    # One thread is steadier than two on a small machine, and gives the same bits each time.
    torch.set_num_threads(1)
    variant = VARIANTS[arguments.variant]
    model = train(variant, Recipe(arguments.steps or variant.steps), arguments.seed)
    save(model, arguments.out)


if __name__ == "__main__":
    main()
