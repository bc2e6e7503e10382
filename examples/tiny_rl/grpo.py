"""The trainer's copy of the policy, and a GRPO step on it. This module does not talk to a server.

Plain GRPO (Shao et al. 2024, arXiv 2402.03300) with one on-policy update a step: the ratio to the sampling policy is 1,
so the loss is the policy gradient. Advantages are relative to the group, the loss is a mean over tokens, and there is
no KL term. Tokens of older weights count with their ratio, up to `MAX_RATIO`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from safetensors.torch import save
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from examples.tiny_rl.batches import IGNORED, Sample, collate, parts_of

LEARNING_RATE = 2e-4
BETAS = (0.9, 0.98)
CLIP = 1.0
"""Maximum norm of the gradient."""
TOLERANCE = 1e-4
"""Largest accepted difference of log-probs, in nats, between server and trainer. With equal weights in float32 the
difference was up to 3e-5. One update changes some log-probs by more than 0.1."""
MAX_RATIO = 2.0
"""Maximum importance ratio (truncated importance sampling). A few large ratios would make up most of a gradient."""


class StaleWeights(RuntimeError):
    """The server did not sample with the weights that the trainer has."""


@dataclass(frozen=True)
class Trained(Sample):
    """A trajectory to train on."""

    logprobs: Sequence[float]
    """Server's log-probs of the response's tokens, in nats, 0 for a token that a tool wrote."""
    advantage: float
    stale: int = 0
    """Number of tokens at the start of the response that older weights sampled."""


@dataclass(frozen=True)
class Update:
    """The result of one step."""

    loss: float
    gradient_norm: float
    gap: float
    """Largest difference between the log-probs of server and trainer, in nats, without stale tokens."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return each reward's distance from the group's mean in standard deviations, or 0 if all rewards are equal."""
    mean = fmean(rewards)
    std = pstdev(rewards)
    if std == 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


def scaled(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide the advantages of all groups by their root mean square, unless all are 0.

    They become about as large as GRPO's. The factor is common to the whole step, so the gradient keeps its direction.
    Each group's own standard deviation would bias the direction, because it depends on which trajectories were
    returned.
    """
    root_mean_square = sqrt(fmean(value**2 for group in values for value in group))
    if root_mean_square == 0:
        return [[0.0] * len(group) for group in values]
    return [[value / root_mean_square for value in group] for group in values]


def log_probs(model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the labels after the first, [samples, positions - 1], in nats, 0 without a label."""
    logits = model(input_ids=tokens).logits[:, :-1].transpose(1, 2)
    return -cross_entropy(logits, labels[:, 1:], ignore_index=IGNORED, reduction="none")


def policy_loss(logprobs: torch.Tensor, advantage: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """Return the loss whose gradient is the policy gradient, summed over tokens.

    Args:
        logprobs: [samples, positions], 0 outside the response.
        advantage: [samples].
        ratios: importance ratio of each token, [samples, positions].
    """
    return -(logprobs * ratios * advantage[:, None]).sum()


def importance(part: Sequence[Trained], logprobs: torch.Tensor) -> torch.Tensor:
    """Return the importance ratio of each token, in the shape of ``logprobs`` from `log_probs`.

    It is the token's probability now by its probability when it was sampled, at most `MAX_RATIO`, and 1 unless the
    token is stale.
    """
    ratios = torch.ones_like(logprobs)
    for trained, row, now in zip(part, ratios, logprobs, strict=True):
        start = trained.prompt_length - 1
        stale = slice(start, start + trained.stale)
        before = torch.tensor(trained.logprobs[: trained.stale])
        row[stale] = (now[stale] - before).exp().clamp(max=MAX_RATIO)
    return ratios


class Learner:
    """The policy in training, in float32."""

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE) -> None:
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)

    def weights(self) -> bytes:
        """Return a safetensors file of all weights under their Hugging Face names, with tied weights once."""
        return save({name: tensor.detach() for name, tensor in self.model.named_parameters()})

    def state(self) -> dict[str, Any]:
        """Return weights and the optimizer's moments, for `load_state`."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another learner."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def update(self, batch: Sequence[Trained]) -> Update:
        """Take one step on all trajectories.

        Raises:
            StaleWeights: other weights sampled tokens that are not stale. The policy is unchanged.
        """
        total = sum(trained.num_targets for trained in batch)
        loss = 0.0
        gap = 0.0
        for part in parts_of(sorted(batch, key=lambda trained: len(trained.tokens))):
            logprobs = log_probs(self.model, *collate(part))
            advantage = torch.tensor([trained.advantage for trained in part])
            part_loss = policy_loss(logprobs, advantage, importance(part, logprobs.detach())) / total
            torch.autograd.backward(part_loss)
            loss += part_loss.item()
            gap = max(gap, largest_gap(part, logprobs.detach()))

        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
        if gap <= TOLERANCE:
            self._optimizer.step()
        self._optimizer.zero_grad()
        if gap > TOLERANCE:
            raise StaleWeights(
                f"the server's log-probs differ from the trainer's by up to {gap:.2g} nats (at most {TOLERANCE:g}): "
                f"it samples with other weights. Did the last push arrive? Does anything else push weights to it?"
            )
        return Update(loss, norm, gap)


def largest_gap(part: Sequence[Trained], logprobs: torch.Tensor) -> float:
    """Return the largest difference to the server's log-probs, in nats, without stale tokens.

    Args:
        logprobs: result of `log_probs`.
    """
    largest = 0.0
    for trained, row in zip(part, logprobs, strict=True):
        start = trained.prompt_length - 1
        ours = row[start : start + len(trained.logprobs)]
        differences = (ours - torch.tensor(trained.logprobs))[trained.stale :]
        if len(differences):
            largest = max(largest, float(differences.abs().max()))
    return largest
