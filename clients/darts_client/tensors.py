"""Groups as padded tensors for a policy-gradient step. Needs the extra `darts-client[torch]`.

```python
batch = to_tensors(groups, rewards=[[1.0, 0.0], [0.0, 0.0]])
loss = -(batch.advantages[:, None] * new_logprobs * batch.completion_mask).sum() / batch.completion_mask.sum()
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: darts_client.tensors needs darts-client[torch]", name=exc.name) from exc

from ._models import Group, Trajectory
from ._rewards import values_by_group
from .advantages import run_weight, server_advantages, unbiased_advantages


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """N trajectories, group after group, with prompts of up to P tokens and completions of up to C tokens.

    A tensor is None unless all trajectories have its values. Log-probs and versions are 0 in the padding.
    """

    prompt_ids: Tensor | None
    """(N, P) int64, padded on the left with `pad_id`."""
    prompt_mask: Tensor | None
    """(N, P) bool, false in the padding."""
    completion_ids: Tensor
    """(N, C) int64, padded on the right with `pad_id`."""
    completion_mask: Tensor
    """(N, C) bool, false in the padding."""
    logprobs: Tensor | None
    """(N, C) float32, natural log-probs under the engine's policy."""
    weight_versions: Tensor | None
    """(N, C) int64, version of the weights that sampled each token."""
    rewards: Tensor | None
    """(N,) float32."""
    advantages: Tensor | None
    """(N,) float32, times `advantages.run_weight` of the group."""
    weights: Tensor | None
    """(N,) float32, 1 / (probability of the trajectory's return)."""
    group: Tensor
    """(N,) int64, index of each trajectory's group."""


def to_tensors(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]] | None = None,
    *,
    pad_id: int = 0,
    advantages: Literal["grpo", "unbiased", "server"] = "grpo",
    scale: bool = True,
    eps: float = 1e-6,
    baselines: Sequence[float | None] | None = None,
) -> Tensors:
    """Return the trajectories of all groups as tensors on the CPU.

    Args:
        rewards: a list for each group, with one reward for each trajectory. Default: the verifier's, if all
            trajectories have a reward.
        pad_id: token id of the padding.
        advantages: "grpo" for (r - mean) / (std + `eps`) with the group's mean and sample standard deviation (GRPO,
            arXiv 2402.03300, section 4.1.2), "unbiased" for `advantages.unbiased_advantages`, or "server" for
            `advantages.server_advantages`, which needs no rewards. Groups under `informative` have no "grpo"
            without `rewards`.
        scale: False leaves r - mean with "grpo" (Dr. GRPO, arXiv 2503.20783).
        baselines: for "unbiased", a baseline for each group that was known before, such as `earlier_pass_rate` if
            rewards are 1 for correct and 0 for wrong; or None for the default.

    Raises:
        ValueError: there is no trajectory, numbers do not match, a group has no weights, or "grpo" has baselines.
    """
    if advantages not in ("grpo", "unbiased", "server"):
        raise ValueError(f"advantages must be 'grpo', 'unbiased' or 'server', got {advantages!r}")
    if baselines is None:
        baselines = [None] * len(groups)
    elif advantages != "unbiased":
        raise ValueError(f'baselines need advantages="unbiased", got {advantages!r}')
    elif len(baselines) != len(groups):
        raise ValueError(f"baselines must be {len(groups)} numbers, one for each group, got {len(baselines)}")

    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise ValueError("the groups have no trajectories")
    completion_ids, completion_mask = _pad([trajectory.token_ids for trajectory in trajectories], pad_id)

    prompt_ids = None
    prompt_mask = None
    prompts = [
        group.prompt_token_ids for group in groups for _ in group.trajectories if group.prompt_token_ids is not None
    ]
    if len(prompts) == len(trajectories):
        prompt_ids, prompt_mask = _pad(prompts, pad_id, left=True)

    # A group's mean of the rewards that decided its selection is biased, so "grpo" has no advantages.
    selected_by_rewards = rewards is None and any(group.num_rewarded is not None for group in groups)
    if rewards is None and all(trajectory.reward is not None for trajectory in trajectories):
        # `or` is for mypy.
        rewards = [[trajectory.reward or 0.0 for trajectory in group.trajectories] for group in groups]
    rewards_tensor = None
    group_advantages: list[Tensor] = []
    if advantages == "server":
        group_advantages = [torch.tensor(server_advantages(group)) for group in groups]
    if rewards is not None:
        checked_rewards = values_by_group(groups, rewards)
        rewards_tensor = torch.tensor([reward for group_rewards in checked_rewards for reward in group_rewards])
        for group, group_rewards, baseline in zip(groups, checked_rewards, baselines, strict=True):
            if advantages == "unbiased":
                group_advantages.append(torch.tensor(unbiased_advantages(group, group_rewards, baseline)))
            elif advantages == "grpo" and not selected_by_rewards:
                group_advantages.append(run_weight(group) * _grpo_advantages(group_rewards, scale, eps))

    weights = [trajectory.weight for trajectory in trajectories if trajectory.weight is not None]
    return Tensors(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        logprobs=_pad_logprobs(trajectories, completion_mask),
        weight_versions=_pad_versions(trajectories, completion_mask),
        rewards=rewards_tensor,
        advantages=torch.cat(group_advantages) if group_advantages else None,
        weights=torch.tensor(weights) if len(weights) == len(trajectories) else None,
        group=torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class SessionTensors:
    """R rows of sessions, of up to T tokens."""

    token_ids: Tensor
    """(R, T) int64, padded on the right."""
    attention_mask: Tensor
    """(R, T) bool, false in the padding."""
    completion_mask: Tensor
    """(R, T) bool, true for generated tokens alone."""
    logprobs: Tensor
    """(R, T) float32, natural log-probs of generated tokens, and 0 elsewhere."""
    advantages: Tensor
    """(R,) float32."""


def session_tensors(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> SessionTensors:
    """Return rows of `SessionGroup.to_rows` as tensors on the CPU. Raise ValueError if a row has no advantage."""
    if any(row["advantage"] is None for row in rows):
        raise ValueError("the rows have no advantages; give a number for each trajectory to to_rows")
    token_ids, attention_mask = _pad([row["token_ids"] for row in rows], pad_id)
    logprobs = torch.zeros(attention_mask.shape)
    logprobs[attention_mask] = torch.tensor([value for row in rows for value in row["logprobs"]])
    completion_mask, _ = _pad([row["mask"] for row in rows], 0)
    return SessionTensors(
        token_ids=token_ids,
        attention_mask=attention_mask,
        completion_mask=completion_mask.bool(),
        logprobs=logprobs,
        advantages=torch.tensor([row["advantage"] for row in rows]),
    )


def _grpo_advantages(group_rewards: Sequence[float], scale: bool, eps: float) -> Tensor:
    # The mean of equal rewards may differ from them by a rounding error, which their standard deviation would enlarge.
    if not group_rewards or min(group_rewards) == max(group_rewards):
        return torch.zeros(len(group_rewards))
    rewards = torch.tensor(group_rewards, dtype=torch.float64)
    centred = rewards - rewards.mean()
    if scale:
        centred = centred / (rewards.std() + eps)
    return centred.float()


def _pad_logprobs(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor | None:
    rows = [trajectory.logprobs for trajectory in trajectories if trajectory.logprobs is not None]
    if len(rows) < len(trajectories):
        return None
    padded = torch.zeros(mask.shape)
    padded[mask] = torch.tensor([value for row in rows for value in row])
    return padded


def _pad_versions(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor | None:
    versions: list[int] = []
    for trajectory in trajectories:
        # The server may not have reported the versions of all tokens.
        if sum(num_tokens for _, num_tokens in trajectory.version_spans) != trajectory.length:
            return None
        for version, num_tokens in trajectory.version_spans:
            versions += [version] * num_tokens
    padded = torch.zeros(mask.shape, dtype=torch.int64)
    padded[mask] = torch.tensor(versions, dtype=torch.int64)
    return padded


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.arange(int(lengths.max()))
    if left:
        positions = positions.flip(0)
    mask = positions < lengths[:, None]
    ids = torch.full(mask.shape, pad_id)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, mask
