"""The lengths of a training run's rollouts: from a trace, with resampled candidates, or from a fitted preset."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEIGHBOURS = 8
"""Prompts with a similar mean length whose samples also stand for a prompt's."""
OWN_SHARE = 0.5
"""Share of resampled candidates that come from the prompt's own samples."""


class Workload(Protocol):
    """Prompts of a training run, by number from 0. All of them are different, also if there are few in a trace."""

    @property
    def max_tokens(self) -> int: ...

    def prompt_tokens(self, number: int) -> int: ...

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        """Return how long ``count`` candidates of a prompt would become, in tokens; at ``max_tokens`` it is truncated.

        ``attempt``: above 0 for candidates that are started once more, in a later rollout.
        """
        ...


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One prompt of a trace: its tokens, and the lengths of its samples."""

    prompt_tokens: int
    lengths: tuple[int, ...]


class TracedWorkload:
    """Prompts of a trace in random order; as many times over as are needed.

    The first candidates of a prompt are its samples in the trace. All further ones are resampled: half of them from the
    prompt's own samples, half from those of the `NEIGHBOURS` prompts with the nearest mean length, scaled to the
    prompt's mean, all in logarithms. Each gets normal noise of variance s² / n, with s the std of the prompt's n
    samples: drawing n values with replacement loses just this share of their variance. What was drawn from truncated
    samples is truncated; noise that would truncate another one is left out.
    """

    def __init__(self, prompts: Sequence[TracedPrompt], max_tokens: int, seed: int) -> None:
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._logs = [np.log(np.asarray(prompt.lengths, dtype=np.float64)) for prompt in prompts]
        self._means = np.asarray([float(logs.mean()) for logs in self._logs])
        self._order = np.random.default_rng(seed).permutation(len(prompts))

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def prompt_tokens(self, number: int) -> int:
        return self._prompts[self._row(number)].prompt_tokens

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        row = self._row(number)
        own = np.asarray(self._prompts[row].lengths if number < len(self._prompts) and not attempt else ())
        resampled = self._resample(row, max(0, count - own.size), rng)
        lengths: Ints = np.concatenate([own[:count], resampled]).astype(np.int64)
        return lengths

    def _row(self, number: int) -> int:
        return int(self._order[number % len(self._order)])

    def _resample(self, row: int, count: int, rng: np.random.Generator) -> Ints:
        own, limit = self._logs[row], log(self._max_tokens)
        distances = np.abs(self._means - self._means[row])
        distances[row] = np.inf
        near = np.argsort(distances, kind="stable")[: min(NEIGHBOURS, len(distances) - 1)]
        others = [(self._logs[i], self._means[row] - self._means[i]) for i in near]
        values = np.concatenate([own, *(logs + shift for logs, shift in others)])
        truncated = np.concatenate([own, *(logs for logs, _ in others)]) >= limit
        shares = np.full(values.size, (1 - OWN_SHARE) / max(1, values.size - own.size))
        shares[: own.size] = (OWN_SHARE if others else 1.0) / own.size
        chosen = rng.choice(values.size, count, p=shares)
        spread = own.std(ddof=1) / np.sqrt(own.size) if own.size > 1 else 0.0
        drawn = values[chosen]
        noisy = drawn + spread * rng.standard_normal(count)
        ends = np.minimum(np.where(noisy < limit, noisy, drawn), limit)
        lengths = np.clip(np.round(np.exp(ends)), 1, self._max_tokens - 1)
        return np.where(truncated[chosen], self._max_tokens, lengths).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of positive values by its quantiles, linear in their logarithms between these."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, share: float | Floats) -> Floats:
        return np.asarray(np.exp(np.interp(share, self.shares, np.log(self.values))))


@dataclass(frozen=True, slots=True)
class FittedWorkload:
    """Prompts with ``medians`` of lengths, and candidates with ``ratios`` to their prompt's median.

    ``prompt_median``, ``prompt_spread``: median of prompts' tokens, and the std of their logarithm.
    """

    medians: Quantiles
    ratios: Quantiles
    max_tokens: int
    prompt_median: float
    prompt_spread: float
    seed: int = 0

    def prompt_tokens(self, number: int) -> int:
        noise = np.random.default_rng([self.seed, number, 1]).standard_normal()
        return max(1, round(float(self.prompt_median * np.exp(self.prompt_spread * noise))))

    def lengths(self, number: int, count: int, rng: np.random.Generator, attempt: int = 0) -> Ints:
        median = self.medians.at(np.random.default_rng([self.seed, number, 2]).random())
        lengths = np.ceil(median * self.ratios.at(rng.random(count)))
        return np.clip(lengths, 1, self.max_tokens).astype(np.int64)
