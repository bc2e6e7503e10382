"""The training loop's requests to the server, for groups and for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_client import Client, Group, Trajectory
from darts_server.demo.problems import MAX_RESPONSE_TOKENS

TIMEOUT_SECONDS = 300.0  # a batch of the tiny task takes seconds

Policy = str | Mapping[str, object]
"""The name of a policy, or ``name`` and settings to change, as ``POST /darts/v1/rollouts`` takes them."""


@dataclass(frozen=True)
class Rollouts:
    """A batch of groups, in the order of the prompts. ``generated``: tokens of all candidates."""

    groups: Sequence[Group]
    generated: int


def rollouts(client: Client, policy: Policy, prompts: Sequence[list[int]], group_size: int) -> Rollouts:
    """Request a group for each prompt (token ids), as one batch with one budget and one deadline."""
    batch = client.rollouts(prompts, group_size=group_size, max_tokens=MAX_RESPONSE_TOKENS, policy=policy)
    groups = sorted(batch, key=lambda group: group.number)
    if batch.failed:
        raise RuntimeError(f"{len(batch.failed)} of {len(prompts)} groups failed; the first: {batch.failed[0].error}")
    assert batch.usage is not None, "a finished batch has its usage"
    return Rollouts(groups, batch.usage.generated)


def samples(client: Client, prompts: Sequence[str], count: int) -> list[tuple[Trajectory, ...]]:
    """Request ``count`` unshaped answers to each prompt.

    They pass through vLLM alone, so the server neither shapes them nor learns from them.
    """
    groups = client.completions(prompts, group_size=count, max_tokens=MAX_RESPONSE_TOKENS, policy="off", logprobs=False)
    return [group.trajectories for group in groups]


def truncated(trajectory: Trajectory) -> bool:
    """Return whether it reached its length limit, or the deadline of ``darts_cut``."""
    return trajectory.finish_reason == "length"
