"""The log of a training run: one JSON object for each step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

import numpy as np

DIGITS = 4
"""Significant digits of a number in a log. Runs differ by far more, and hundreds of logs are kept."""


@dataclass(frozen=True)
class Seconds:
    """Time of a step by phase, without evaluation."""

    rollout: float
    train: float
    push: float

    @property
    def total(self) -> float:
        return self.rollout + self.train + self.push


@dataclass(frozen=True)
class Training:
    """Figures of one step, over the returned groups. Lengths are in tokens."""

    right: float
    reward_variance: float
    """Mean variance within a group."""
    length_mean: float
    length_p95: float
    truncated: float
    """Share of truncated trajectories."""
    generated: int
    """Tokens of all candidates."""
    trained: int
    """Tokens of returned trajectories."""
    decode_steps: int
    """Engine steps until all groups were complete. Unlike seconds, they are the same on a busy machine."""
    loss: float
    gradient_norm: float
    logprob_gap: float
    """Largest difference between server and trainer, in nats."""
    weight_version: int
    """Oldest version that the server sampled with."""
    seconds: Seconds
    off_policy: float = 0.0
    """Share of the trained tokens that older weights sampled."""


@dataclass(frozen=True)
class HeldOut:
    """Figures of unshaped samples of prompts that are not trained on. Lengths are in tokens."""

    samples: int
    right: float
    standard_error: float
    """Standard error of ``right`` over prompts, because samples of one prompt are not independent."""
    length_mean: float
    length_p95: float
    length_std: float
    """Standard deviation within a prompt (n - 1), mean over prompts."""
    truncated: float
    rights: Mapping[str, Sequence[float]]
    """Share of correct answers of each prompt, by difficulty, in an order that never changes."""

    @classmethod
    def of(
        cls,
        difficulties: Sequence[str],
        rewards: Sequence[Sequence[float]],
        lengths: Sequence[Sequence[int]],
        truncated: int,
    ) -> Self:
        """Summarize rewards and lengths of each prompt's samples, at least two each."""
        rights = [fmean(prompt) for prompt in rewards]
        flat = [length for prompt in lengths for length in prompt]
        by_difficulty: dict[str, list[float]] = {}
        for difficulty, right in sorted(zip(difficulties, rights, strict=True), key=lambda pair: pair[0]):
            by_difficulty.setdefault(difficulty, []).append(right)
        return cls(
            samples=len(flat),
            right=fmean(rights),
            standard_error=stdev(rights) / sqrt(len(rights)) if len(rights) > 1 else 0.0,
            length_mean=fmean(flat),
            length_p95=float(np.percentile(flat, 95)),
            length_std=fmean(stdev(prompt) for prompt in lengths),
            truncated=truncated / len(flat),
            rights=by_difficulty,
        )


@dataclass(frozen=True)
class Entry:
    """One line of the log. Step 0 is the policy before training. ``held_out`` is the evaluation after the step."""

    step: int
    training: Training | None = None
    held_out: HeldOut | None = None

    def line(self) -> str:
        return json.dumps(_shortened(asdict(self)), separators=(",", ":"))

    @classmethod
    def read(cls, line: str) -> Self:
        """Parse an entry from its line."""
        fields: dict[str, Any] = json.loads(line)
        training = fields.get("training")
        if training is not None:
            training = Training(**training | {"seconds": Seconds(**training["seconds"])})
        held_out = fields.get("held_out")
        if held_out is not None:
            held_out = HeldOut(**held_out)
        return cls(fields["step"], training, held_out)


def _shortened(value: Any) -> Any:
    """Leave out None, and digits that say nothing."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value]
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() else short
    return value


def read_log(path: Path) -> list[Entry]:
    """Read all entries of a log."""
    return [Entry.read(line) for line in path.read_text().splitlines()]
