"""Length statistics of a prompt and of the data set, updated group by group; and the keys of prompts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from darts_server.policy.checks import LARGEST, MIN_MEAN, check_count, check_length, check_number
from darts_server.policy.lengths.estimate import LengthEstimate, Observation, estimate_lengths

EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages: the value of the paper's public code."""
WINDOW_STEPS = 10
"""Steps over which the data set's spread is averaged: the value of the paper's public code."""

KEY_BYTES = 12
"""96 bits: the chance that any two of a million prompts share a key is below 1e-16."""


@dataclass(frozen=True, slots=True)
class PromptStats:
    """One prompt's length statistics. Plain fields: ``PromptStats(**json)`` restores it.

    ``std_ema``, ``mean_ema``: exponential moving averages over the prompt's groups, in tokens; ``std_ema`` is ``None``
    until a group had two candidates. ``groups``, ``candidates``: how many they come from. ``weight_version``: of the
    last group.
    """

    std_ema: float | None
    mean_ema: float
    groups: int
    candidates: int
    weight_version: int | None

    def __post_init__(self) -> None:
        if self.std_ema is not None:
            check_number("std_ema", self.std_ema)
        check_number("mean_ema", self.mean_ema, MIN_MEAN)
        check_count("groups", self.groups)
        check_count("candidates", self.candidates)
        if self.weight_version is not None:
            check_count("weight_version", self.weight_version)

    @property
    def candidates_of_mean(self) -> float:
        """The number of candidates whose plain mean varies as much as ``mean_ema``, in which the newest count most."""
        groups, older = max(self.groups, 1), (1 - EMA_ALPHA) ** 2
        first = older ** (groups - 1)
        squares = first + EMA_ALPHA**2 * (1 - first) / (1 - older)  # of the groups' weights
        return self.candidates / groups / squares


def update_stats(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    weight_version: int | None,
    alpha: float = EMA_ALPHA,
) -> PromptStats:
    """Return the statistics after one more group. The first group counts fully, later ones with weight ``alpha``.

    Raises:
        ValueError: ``alpha`` is out of range, or no candidate generated anything.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    latest = estimate_lengths(observations)
    if stats is None:
        return PromptStats(latest.std, latest.mean, 1, len(observations), weight_version)
    return PromptStats(
        std_ema=_average(stats.std_ema, latest.std, alpha),
        mean_ema=alpha * latest.mean + (1 - alpha) * stats.mean_ema,
        groups=min(stats.groups + 1, LARGEST),
        candidates=min(stats.candidates + len(observations), LARGEST),
        weight_version=weight_version,
    )


def _average(old: float | None, new: float | None, alpha: float) -> float | None:
    if old is None or new is None:
        return new if old is None else old
    return alpha * new + (1 - alpha) * old


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """Length statistics of the data set. Plain fields: ``DatasetStats(**json)`` restores it.

    ``recent_stds``: mean length std within a prompt, for each of the last `WINDOW_STEPS` steps that had any. ``mean``:
    mean length of the last step (l-bar). Both in tokens. ``steps``: number of steps so far.
    """

    recent_stds: tuple[float, ...] = ()
    mean: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent_stds", tuple(self.recent_stds))  # JSON has lists only
        check_length("recent_stds", self.recent_stds, WINDOW_STEPS)
        for std in self.recent_stds:
            check_number("recent_stds", std)
        if self.mean is not None:
            check_number("mean", self.mean, MIN_MEAN)
        check_count("steps", self.steps)

    @property
    def std(self) -> float | None:
        """Mean of ``recent_stds`` (sigma-bar); ``None`` before there is any."""
        return math.fsum(self.recent_stds) / len(self.recent_stds) if self.recent_stds else None

    def with_step(self, prompts: Iterable[LengthEstimate]) -> "DatasetStats":
        """Return the statistics after one more step with these ``prompts``. A step without any changes nothing.

        Each prompt counts once. Weighting by candidates would let the allocation change the mean that steers it.
        """
        estimates = list(prompts)
        if not estimates:
            return self
        stds = [e.std for e in estimates if e.std is not None]
        recent = (*self.recent_stds, math.fsum(stds) / len(stds)) if stds else self.recent_stds
        return DatasetStats(
            recent_stds=recent[-WINDOW_STEPS:],
            mean=math.fsum(e.mean for e in estimates) / len(estimates),
            steps=min(self.steps + 1, LARGEST),
        )


def make_prompt_key(token_ids: Sequence[int]) -> str:
    """Make the key of a prompt from a hash of its tokens. It is the same in every process and on every host."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=KEY_BYTES).hexdigest()
