"""The way training groups are sampled and rewarded: by a policy of the server, or by a trainer's own means."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS

Policy = str | Mapping[str, object]
"""The name of a policy, or ``name`` and settings to change, in the form of ``POST /darts/v1/rollouts``."""


@dataclass(frozen=True)
class Method:
    """Options of the policy, of the request and of the trainer.

    Args:
        max_tokens: length limit of training trajectories. An evaluation has the limit `MAX_RESPONSE_TOKENS`.
        overlong: number of tokens before the limit for which the reward is lower, see `penalty`.
        started: number of started prompts for each prompt that is trained on. Above 1, the first whole groups are used,
            and the other prompts start again in the next step (tail batching).
        unbiased: whether the trajectories' weights replace GRPO's advantages, so that the expected step is that of
            plain samples. It needs a policy that returns weights.
        carry: "restart" lets the server keep the other prompts of tail batching and start them first in the next step.
            "resume" keeps their tokens, too (partial rollouts). With ``None`` only the trainer remembers them.
        long_rounds: whether the other prompts of tail batching wait until they fill a batch of their own, so that no
            other batch waits for a long answer (the long rounds of RollPacker, arXiv 2509.21009).
        staleness: 1 generates each batch while the batch before is trained on, with weights that are one update older
            (one-step-off training).

    Raises:
        ValueError: options conflict.
    """

    policy: Policy
    max_tokens: int = MAX_RESPONSE_TOKENS
    overlong: int = 0
    started: float = 1.0
    unbiased: bool = False
    # Saved runs are recognized by this class's `repr`, and older saved runs do not have these options.
    carry: Literal["restart", "resume"] | None = field(default=None, repr=False)
    staleness: int = field(default=0, repr=False)
    long_rounds: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.carry is not None and self.started <= 1:
            raise ValueError(f"carry={self.carry!r} needs started above 1, else no prompt is left over")
        if self.staleness not in (0, 1) or (self.staleness and self.started > 1):
            raise ValueError("staleness is 0 or 1, and 1 does not go with started above 1")
        if self.long_rounds and self.started <= 1:
            raise ValueError("long_rounds needs started above 1, else no prompt is left over")

    @property
    def is_off_policy(self) -> bool:
        """Whether older weights may have sampled some tokens."""
        return self.carry == "resume" or self.staleness > 0

    @property
    def settings(self) -> str:
        """All options as text, by which a saved run is recognized."""
        later = {"carry": self.carry, "staleness": self.staleness, "long_rounds": self.long_rounds}
        parts = [f" {name}={value}" for name, value in later.items() if value]
        return repr(self) + "".join(parts)

    def prompts(self, needed: int, left_over: int) -> tuple[int, int]:
        """Return the numbers of left-over prompts and of new prompts that start for ``needed`` groups."""
        started = ceil(self.started * needed)
        if not self.long_rounds:
            return left_over, started - left_over
        if left_over >= needed:
            return needed, 0
        return 0, started

    def penalty(self, length: int) -> float:
        """Return the number that is subtracted from the reward of a trajectory of ``length`` tokens.

        It grows linearly from 0 to 1 over the last ``overlong`` tokens before the limit (the soft overlong punishment
        of DAPO, arXiv 2503.14476).
        """
        if self.overlong == 0:
            return 0.0
        start = self.max_tokens - self.overlong
        return max(0.0, length - start) / self.overlong
