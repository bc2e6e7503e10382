"""Groups as padded tensors for a policy-gradient step: needs the extra `darts-client[torch]`.

```python
batch = to_tensors(groups, rewards=[[1.0, 0.0], [0.0, 0.0]])
loss = -(batch.advantages[:, None] * new_logprobs * batch.completion_mask).sum() / batch.completion_mask.sum()
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: darts_client.tensors needs darts-client[torch]", name=exc.name) from exc

from ._models import Group, Trajectory
from ._rewards import values_by_group
from .advantages import unbiased_advantages


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """N trajectories, group after group, each group in its order.

    `prompt_ids`, `prompt_mask`: (N, P) int64 and bool, padded on the left; None unless all prompts have token ids.
    `completion_ids`, `completion_mask`: (N, C) int64 and bool, padded on the right.
    `logprobs`: (N, C) float32 of the engine's policy, 0 in the padding; None unless all trajectories have them.
    `weight_versions`: (N, C) int64, of the weights that sampled each token, 0 in the padding; None unless all
    trajectories have `version_spans`.
    `rewards`, `advantages`: (N,) float32; None without rewards.
    `weights`: (N,) float32, 1 / (probability to be returned); None unless all trajectories have one.
    `group`: (N,) int64, the index of each trajectory's group.
    """

    prompt_ids: Tensor | None
    prompt_mask: Tensor | None
    completion_ids: Tensor
    completion_mask: Tensor
    logprobs: Tensor | None
    weight_versions: Tensor | None
    rewards: Tensor | None
    advantages: Tensor | None
    weights: Tensor | None
    group: Tensor


def to_tensors(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]] | None = None,
    *,
    pad_id: int = 0,
    advantages: Literal["grpo", "unbiased"] = "grpo",
    scale: bool = True,
    eps: float = 1e-6,
    baselines: Sequence[float | None] | None = None,
) -> Tensors:
    """Return the trajectories of all groups as tensors on the CPU.

    `rewards` holds a list for each group. With "grpo", an advantage is relative to its group (GRPO, arXiv 2402.03300,
    section 4.1.2): (r - mean) / (std + `eps`) with the sample's standard deviation. Without `scale` it is r - mean (Dr.
    GRPO, arXiv 2503.20783). With "unbiased" it is that of `advantages.unbiased_advantages`, without `scale` and `eps`.
    Then `baselines` may hold a baseline for each group that was known before it, for example its `earlier_pass_rate` if
    rewards are 1 for right and 0 for wrong; None for the one of the group's own rewards.

    Raises:
        ValueError: there is no trajectory, or not one reward for each; "unbiased", and a group has no weights; or not
            one baseline for each group, or baselines without "unbiased".
    """
    if baselines is not None and advantages != "unbiased":
        raise ValueError(f'baselines need advantages="unbiased", got {advantages!r}')
    if baselines is not None and len(baselines) != len(groups):
        raise ValueError(f"baselines must be {len(groups)} numbers, one for each group, got {len(baselines)}")
    members = [(index, group, t) for index, group in enumerate(groups) for t in group.trajectories]
    if not members:
        raise ValueError("the groups have no trajectories")
    completions = [t.token_ids for _, _, t in members]
    completion_ids, completion_mask = _pad(completions, pad_id, left=False)
    prompts = [group.prompt_token_ids for _, group, _ in members if group.prompt_token_ids is not None]
    has_prompts = len(prompts) == len(members)
    prompt_ids, prompt_mask = _pad(prompts, pad_id, left=True) if has_prompts else (None, None)
    values = None if rewards is None else values_by_group(groups, rewards)
    rows = None if values is None else [torch.tensor(row) for row in values]
    weights = [t.weight for _, _, t in members if t.weight is not None]
    baselines = baselines or [None] * len(groups)

    def compute(group: Group, row: Sequence[float], baseline: float | None) -> Tensor:
        if advantages == "unbiased":
            return torch.tensor(unbiased_advantages(group, row, baseline))
        return _advantages(torch.tensor(row), scale, eps)

    return Tensors(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        logprobs=_pad_logprobs([t for _, _, t in members], completion_mask),
        weight_versions=_pad_versions([t for _, _, t in members], completion_mask),
        rewards=None if rows is None else torch.cat(rows),
        advantages=None if values is None else torch.cat(list(map(compute, groups, values, baselines))),
        weights=torch.tensor(weights) if len(weights) == len(members) else None,
        group=torch.tensor([index for index, _, _ in members]),
    )


def _advantages(rewards: Tensor, scale: bool, eps: float) -> Tensor:
    centred = rewards - rewards.mean()
    if not scale or len(rewards) < 2:  # a single one has no standard deviation
        return centred
    return centred / (rewards.std() + eps)


def _pad_logprobs(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor | None:
    rows = [t.logprobs for t in trajectories if t.logprobs is not None]
    if len(rows) < len(trajectories):
        return None
    padded = torch.zeros(mask.shape)
    padded[mask] = torch.tensor([value for row in rows for value in row])
    return padded


def _pad_versions(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor | None:
    if any(sum(tokens for _, tokens in t.version_spans) != t.length for t in trajectories):
        return None
    padded = torch.zeros(mask.shape, dtype=torch.int64)
    versions = [version for t in trajectories for version, tokens in t.version_spans for _ in range(tokens)]
    padded[mask] = torch.tensor(versions, dtype=torch.int64)
    return padded


def _pad(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return the ids and a mask that is false in the padding."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    positions = torch.arange(width)
    mask = (width - 1 - positions if left else positions) < lengths[:, None]
    ids = torch.full((len(rows), width), pad_id)
    ids[mask] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, mask
