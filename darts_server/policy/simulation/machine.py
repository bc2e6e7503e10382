"""What a simulated rollout runs on: the inference engines, and the trainer that waits for them."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.latency import LatencyCurve

Floats = NDArray[np.float64]
BLOCK_SIZE = 16
"""Tokens in a KV block: vLLM's default on GPUs."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a decode step: ``decode`` seconds by the number of running sequences, and what comes on top.

    ``per_context_token``: seconds for each token in the KV cache of the running sequences, which every step reads.
    ``per_prefill_token``: seconds for each token that is prefilled in the step. ``per_start``: seconds for each
    sequence that is admitted in the step, whatever its prompt, also after a preemption; see `latency.start_seconds`.

    Raises:
        ValueError: a number is negative or not finite.
    """

    decode: LatencyCurve
    per_context_token: float = 0.0
    per_prefill_token: float = 0.0
    per_start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_context_token", "per_prefill_token", "per_start"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Inference engines that run a rollout, and the trainer that trains on it afterwards.

    ``replicas``: number of engines; a group runs on one of them. ``max_num_seqs``: how many sequences an engine runs at
    once. ``kv_blocks``: KV blocks of an engine, of ``block_size`` tokens each; ``None`` for as many as are needed.
    ``training_per_token``: seconds of training for each token of a returned trajectory, its prompt included.
    ``between_rollouts``: seconds of a step that do not depend on the lengths, such as the synchronisation of weights.

    Raises:
        ValueError: a number is out of range.
    """

    step_time: StepTime
    replicas: int = 1
    max_num_seqs: int = 256
    kv_blocks: int | None = None
    block_size: int = BLOCK_SIZE
    training_per_token: float = 0.0
    between_rollouts: float = 0.0

    def __post_init__(self) -> None:
        for name in ("replicas", "max_num_seqs", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ValueError(f"kv_blocks must be at least 1, got {self.kv_blocks}")
        for name in ("training_per_token", "between_rollouts"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")

    def scaled(self, weight: float) -> "Machine":
        """Return the machine as it is for sequences of which each stands for so many: a scale model of a large one.

        With a ``weight`` of 1 / R it is a model of R such machines, as one that has the places of all.
        """
        times, places = self.step_time, max(1, round(self.max_num_seqs / weight))
        return replace(
            self,
            step_time=StepTime(
                # What rounding adds to the places, or takes away, steps take longer, or shorter.
                times.decode.scaled(weight, slower=weight * places / self.max_num_seqs),
                times.per_context_token * weight,
                times.per_prefill_token * weight,
                times.per_start * weight,
            ),
            max_num_seqs=places,
            kv_blocks=None if self.kv_blocks is None else max(1, round(self.kv_blocks / weight)),
            training_per_token=self.training_per_token * weight,
        )

    def training_seconds(self, tokens: float) -> float:
        """Return the seconds from the end of a rollout to the next, with so many tokens to train on."""
        return self.training_per_token * tokens + self.between_rollouts
