"""Length statistics of prompts and of the data set."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from darts_server.policy.lengths.estimate import LengthEstimate, Observation, estimate_lengths

EMA_ALPHA = 0.3
"""Weight of the newest group in a prompt's averages: the value of the paper's public code."""
WINDOW_STEPS = 10
"""Steps that the data set's spread is averaged over: the value of the paper's public code."""

KEY_BYTES = 12
"""96 bits: no two of a million prompts share a key by chance."""


@dataclass(frozen=True, slots=True)
class PromptStats:
    """One prompt's length statistics over the groups so far. Plain fields: ``PromptStats(**json)`` restores it.

    ``std_ema``, ``mean_ema``: exponential moving averages in tokens; no spread is known while no group had two
    candidates. ``groups``, ``candidates``: how many went into them. ``weight_version``: the last group's.
    """

    std_ema: float | None
    mean_ema: float
    groups: int
    candidates: int
    weight_version: int | None

    def __post_init__(self) -> None:
        known = [self.mean_ema, self.groups, self.candidates, *([] if self.std_ema is None else [self.std_ema])]
        if not all(isinstance(x, int | float) and 0 <= x < math.inf for x in known):
            raise ValueError(f"statistics of a prompt must be finite numbers of at least 0, got {self}")


def update_stats(
    stats: PromptStats | None,
    observations: Sequence[Observation],
    weight_version: int | None,
    alpha: float = EMA_ALPHA,
) -> PromptStats:
    """The statistics after one more group. The first value is taken as it is, later ones with weight ``alpha``.

    Raises:
        ValueError: ``alpha`` is out of range, or no candidate generated anything.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    now = estimate_lengths(observations)
    if stats is None:
        return PromptStats(now.std, now.mean, 1, len(observations), weight_version)
    return PromptStats(
        std_ema=_average(stats.std_ema, now.std, alpha),
        mean_ema=alpha * now.mean + (1 - alpha) * stats.mean_ema,
        groups=stats.groups + 1,
        candidates=stats.candidates + len(observations),
        weight_version=weight_version,
    )


def _average(old: float | None, new: float | None, alpha: float) -> float | None:
    if old is None or new is None:
        return new if old is None else old
    return alpha * new + (1 - alpha) * old


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """The whole data set's lengths. Plain fields: ``DatasetStats(**json)`` restores it.

    ``recent_stds``: for each of the last `WINDOW_STEPS` steps that had any, the mean of its prompts' length stds.
    ``mean``: l-bar, the last step's mean length. ``steps``: how many there were.
    """

    recent_stds: tuple[float, ...] = ()
    mean: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recent_stds", tuple(self.recent_stds))  # JSON knows lists only

    @property
    def std(self) -> float | None:
        """Sigma-bar: the mean over the window; ``None`` before any spread is known."""
        return math.fsum(self.recent_stds) / len(self.recent_stds) if self.recent_stds else None

    def step(self, prompts: Iterable[LengthEstimate]) -> "DatasetStats":
        """After a step with these ``prompts``; each counts once, however many candidates it had.

        Weighting by candidates would tie the mean to the allocation that it steers. An empty step changes nothing.
        """
        estimates = list(prompts)
        if not estimates:
            return self
        stds = [e.std for e in estimates if e.std is not None]
        recent = (*self.recent_stds, math.fsum(stds) / len(stds)) if stds else self.recent_stds
        return DatasetStats(
            recent_stds=recent[-WINDOW_STEPS:],
            mean=math.fsum(e.mean for e in estimates) / len(estimates),
            steps=self.steps + 1,
        )


def make_prompt_key(token_ids: Sequence[int]) -> str:
    """The name of a prompt whose caller gave none: a hash of its tokens, the same in every process and host."""
    return blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=KEY_BYTES).hexdigest()
