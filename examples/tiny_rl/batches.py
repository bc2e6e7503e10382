"""Batches for supervised training: demonstrations as token ids, padded by length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerFast

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, sample_problem
from examples.tiny_rl.demonstrations import CLEAN, Variant, demonstration
from examples.tiny_rl.tokenizer import EOS_ID, PAD_ID

IGNORED = -100  # the label that cross entropy leaves out

# A batch is split into this many parts of similar length: otherwise one long answer among
# many short ones would fill most of the batch with padding.
PARTS = 4


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and its answer; loss falls on the answer alone."""

    tokens: list[int]
    prompt_length: int


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

    ``short``: of easy problems alone. ``clean``: direct chains without an error, whatever the variant's verbosity.
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
    """Return token ids and labels, both [samples, longest], padded on the right.

    Padding needs no attention mask: it comes after all tokens that count, and
    attention is causal.
    """
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.full((len(samples), longest), PAD_ID)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        tokens[row, :length] = torch.tensor(sample.tokens)
        labels[row, sample.prompt_length : length] = tokens[row, sample.prompt_length : length]
    return tokens, labels


def parts_of(samples: Sequence[SampleT]) -> Iterator[list[SampleT]]:
    """Split sorted samples into parts of about equally many tokens."""
    total = sum(len(sample.tokens) for sample in samples)
    part: list[SampleT] = []
    held = 0
    for sample in samples:
        part.append(sample)
        held += len(sample.tokens)
        if held * PARTS >= total:
            yield part
            part, held = [], 0
    if part:
        yield part
