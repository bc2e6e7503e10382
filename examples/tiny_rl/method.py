"""How training groups are sampled and rewarded: a policy of the server, or what plain trainers do instead of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from darts_server.demo.problems import MAX_RESPONSE_TOKENS

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
    """

    policy: Policy
    max_tokens: int = MAX_RESPONSE_TOKENS
    overlong: int = 0
    started: float = 1.0
    unbiased: bool = False

    def prompts(self, needed: int) -> int:
        """Return the number of prompts to start for ``needed`` groups."""
        return ceil(self.started * needed)

    def penalty(self, length: int) -> float:
        """Return what is subtracted from the reward of a trajectory of ``length`` tokens.

        It grows linearly from 0 to 1 over the last ``overlong`` tokens before the limit (the soft overlong punishment
        of DAPO, arXiv 2503.14476).
        """
        return max(0.0, length - (self.max_tokens - self.overlong)) / self.overlong if self.overlong else 0.0
