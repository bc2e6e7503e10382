"""How training groups are sampled and rewarded: a policy of the server, or what plain trainers do instead of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS

Policy = str | Mapping[str, object]
"""The name of a policy, or ``name`` and settings to change, as ``POST /darts/v1/rollouts`` takes them."""


@dataclass(frozen=True)
class Method:
    """Options of the policy, of the request and of the trainer, together.

    Args:
        max_tokens: length limit of training trajectories; an evaluation has none but `MAX_RESPONSE_TOKENS`.
        overlong: reward less for the last this many tokens before the limit, see `penalty`; 0 for no penalty.
        started: prompts started for each that is trained on. Above 1 the first whole groups to finish are used, and
            the other prompts are started again in the next step (tail batching).
        unbiased: use the trajectories' weights, so that the expected step is that of plain samples, in place of GRPO's
            advantages. Needs a policy that returns weights.
        carry: of tail batching: ``None`` if the trainer alone remembers the other prompts. With "restart" the server
            keeps them too, and starts them first in the next step; with "resume" also what was generated for them, so
            that their trajectories go on from there (partial rollouts).
        long_rounds: of tail batching: prompts that were left over wait until they fill a batch of their own, which
            waits for all of them, so that no other batch has to wait for a long one (the long rounds of RollPacker,
            arXiv 2509.21009). By default they start again in the next batch.
        staleness: 1 to generate each batch while the one before it is trained on, so with weights that are one update
            older (one-step-off training).

    Raises:
        ValueError: these do not go together.
    """

    policy: Policy
    max_tokens: int = MAX_RESPONSE_TOKENS
    overlong: int = 0
    started: float = 1.0
    unbiased: bool = False
    # Saved runs are recognized by this class's `repr`, and those of other methods do not know these.
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
        """All options, to recognize a run by."""
        later = {"carry": self.carry, "staleness": self.staleness, "long_rounds": self.long_rounds}
        return "".join([repr(self), *(f" {name}={value}" for name, value in later.items() if value)])

    def prompts(self, needed: int, left_over: int) -> tuple[int, int]:
        """Return how many prompts start for ``needed`` groups: of those left over by earlier batches, and new ones."""
        if self.long_rounds:
            return (needed, 0) if left_over >= needed else (0, ceil(self.started * needed))
        return left_over, ceil(self.started * needed) - left_over

    def penalty(self, length: int) -> float:
        """Return what is subtracted from the reward of a trajectory of ``length`` tokens.

        It grows linearly from 0 to 1 over the last ``overlong`` tokens before the limit (the soft overlong punishment
        of DAPO, arXiv 2503.14476).
        """
        return max(0.0, length - (self.max_tokens - self.overlong)) / self.overlong if self.overlong else 0.0
