"""Batches for supervised training: demonstrations as token ids, padded by length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerFast

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from examples.tiny_rl.demonstrations import CLEAN, Variant, demonstration
from examples.tiny_rl.tokenizer import EOS_ID, PAD_ID

# Cross entropy leaves this label out.
IGNORED = -100

# A batch is split into this number of parts of similar length. Otherwise a long answer among many short answers would
# fill most of the batch with padding.
PARTS = 4


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and its answer. Only the answer has a loss."""

    tokens: list[int]
    prompt_length: int
    given: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Positions of tokens after the prompt that a tool wrote. These tokens have no loss."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that have a loss."""
        return len(self.tokens) - self.prompt_length - len(self.given)


SampleT = TypeVar("SampleT", bound=Sample)


def draw_batch(
    rng: Random,
    tokenizer: PreTrainedTokenizerFast,
    variant: Variant,
    batch_tokens: int,
    *,
    short: bool = False,
    clean: bool = False,
) -> list[Sample]:
    """Draw samples with ``batch_tokens`` tokens in total, sorted from short to long.

    Args:
        short: whether to draw only easy problems.
        clean: whether to write direct chains without an error, whatever the variant's verbosity.
    """
    difficulties = itertools.cycle(("easy",) if short else variant.difficulties)
    verbosity = CLEAN if clean else variant.verbosity
    samples: list[Sample] = []
    drawn = 0
    while drawn < batch_tokens:
        problem = sample_problem(rng, next(difficulties))
        prompt = tokenizer.encode(problem.prompt)
        response = [*tokenizer.encode(demonstration(problem, rng, verbosity)), EOS_ID]
        tokens = prompt + response[:MAX_RESPONSE_TOKENS]
        samples.append(Sample(tokens, len(prompt)))
        drawn += len(tokens)
    return sorted(samples, key=lambda sample: len(sample.tokens))


def collate(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both [samples, longest], padded on the right."""
    # Padding needs no attention mask, because it stands after the other tokens and attention is causal.
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.full((len(samples), longest), PAD_ID)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        tokens[row, :length] = torch.tensor(sample.tokens)
        labels[row, sample.prompt_length : length] = tokens[row, sample.prompt_length : length]
        labels[row, sorted(sample.given)] = IGNORED
    return tokens, labels


def parts_of(samples: Sequence[SampleT]) -> Iterator[list[SampleT]]:
    """Split sorted samples into parts of about equally many tokens."""
    total = sum(len(sample.tokens) for sample in samples)
    part: list[SampleT] = []
    part_tokens = 0
    for sample in samples:
        part.append(sample)
        part_tokens += len(sample.tokens)
        if part_tokens * PARTS >= total:
            yield part
            part = []
            part_tokens = 0
    if part:
        yield part
