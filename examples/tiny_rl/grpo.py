"""The trainer's copy of the policy, and a GRPO step on it. Nothing here talks to a server.

Plain GRPO (Shao et al. 2024, arXiv 2402.03300) with one on-policy update a step: the ratio to the sampling policy is 1,
so the loss is the policy gradient. Advantages are relative to the group, the loss is a mean over tokens, and there is
no KL term. Tokens that older weights sampled count with that ratio, as far as it does not exceed `MAX_RATIO`.
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
CLIP = 1.0  # norm of the gradient
TOLERANCE = 1e-4
"""Largest difference of log-probs, in nats, between server and trainer. Measured with equal weights in float32: up to
3e-5. One update changes some by more than 0.1."""

MAX_RATIO = 2.0
"""Bound of importance ratios (truncated importance sampling): a few large ones would make up most of a gradient."""


class StaleWeights(RuntimeError):
    """The server did not sample with the weights that the trainer has."""


@dataclass(frozen=True)
class Trained(Sample):
    """A trajectory to train on. ``logprobs``: of its response's tokens, in nats, as the server sampled them.

    ``stale``: how many of these tokens, the first, older weights sampled.
    """

    logprobs: Sequence[float]
    advantage: float
    stale: int = 0


@dataclass(frozen=True)
class Update:
    """The result of one step.

    ``gap``: largest difference between the server's log-probs and the trainer's, in nats; stale tokens do not count.
    """

    loss: float
    gradient_norm: float
    gap: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return each reward's distance from the group's mean in standard deviations; 0 if all are equal."""
    mean, std = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / std if std else 0.0 for reward in rewards]


def scaled(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide the advantages of all groups by one number, their root mean square, unless all are 0.

    Afterwards they are about as large as GRPO's. The factor is common to the whole step: it changes how long the
    gradient is, and not its direction. Dividing each group by its own standard deviation would change the direction,
    and bias it, since that depends on which trajectories were returned.
    """
    square = fmean(value**2 for group in values for value in group)
    return [[value / sqrt(square) if square else 0.0 for value in group] for group in values]


def log_probs(model: Qwen3ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probs in nats of the labels after the first, [samples, positions - 1]; 0 without a label."""
    logits = model(input_ids=tokens).logits[:, :-1].transpose(1, 2)
    return -cross_entropy(logits, labels[:, 1:], ignore_index=IGNORED, reduction="none")


def policy_loss(logprobs: torch.Tensor, advantage: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """Return the loss whose gradient is the policy gradient, summed over tokens.

    Args:
        logprobs: of the response's tokens, [samples, positions]; 0 at other positions.
        advantage: [samples]; the same for all tokens of a trajectory.
        ratios: of the tokens' probabilities to those they were sampled with, [samples, positions].
    """
    return -(logprobs * ratios * advantage[:, None]).sum()


def importance(part: Sequence[Trained], logprobs: torch.Tensor) -> torch.Tensor:
    """Return how likely each token is now relative to when it was sampled, `MAX_RATIO` at most; 1 unless it is stale.

    Same shape as ``logprobs``, which are from `log_probs`.
    """
    ratios = torch.ones_like(logprobs)
    for each, row, now in zip(part, ratios, logprobs, strict=True):
        stale = slice(each.prompt_length - 1, each.prompt_length - 1 + each.stale)
        row[stale] = (now[stale] - torch.tensor(each.logprobs[: each.stale])).exp().clamp(max=MAX_RATIO)
    return ratios


class Learner:
    """The policy in training, in float32."""

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE) -> None:
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)

    def weights(self) -> bytes:
        """Return all weights under their Hugging Face names, as a safetensors file that has tied ones once."""
        return save({name: tensor.detach() for name, tensor in self.model.named_parameters()})

    def state(self) -> dict[str, Any]:
        """Return weights and the optimizer's moments, for `load_state`."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from where another learner was."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def update(self, batch: Sequence[Trained]) -> Update:
        """Take one step on all trajectories.

        Raises:
            StaleWeights: the server sampled tokens that are not stale with other weights. The policy is unchanged.
        """
        total = sum(len(each.logprobs) for each in batch)
        loss, gap = 0.0, 0.0
        for part in parts_of(sorted(batch, key=lambda each: len(each.tokens))):
            logprobs = log_probs(self.model, *collate(part))
            advantage = torch.tensor([each.advantage for each in part])
            part_loss = policy_loss(logprobs, advantage, importance(part, logprobs.detach())) / total
            torch.autograd.backward(part_loss)
            loss, gap = loss + part_loss.item(), max(gap, largest_gap(part, logprobs.detach()))
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
    """Return the largest difference to the server's log-probs, in nats, without those of stale tokens.

    ``logprobs`` are from `log_probs`.
    """
    gaps = [
        (row[each.prompt_length - 1 :][: len(each.logprobs)] - torch.tensor(each.logprobs))[each.stale :].abs().max()
        for each, row in zip(part, logprobs, strict=True)
        if len(each.logprobs) > each.stale
    ]
    return float(max(gaps, default=0.0))
