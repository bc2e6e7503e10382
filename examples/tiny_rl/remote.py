"""What the training loop asks of the server: trajectories, new weights, and samples for evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from darts_client import Client
from examples.tiny_rl.task import MAX_RESPONSE_TOKENS

TIMEOUT_SECONDS = 300.0  # a batch of the tiny task takes seconds


@dataclass(frozen=True)
class Trajectory:
    """A returned trajectory. ``truncated``: it reached its length limit or the deadline of ``darts_cut``."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    truncated: bool
    weight_version: int


@dataclass(frozen=True)
class Rollouts:
    """A batch of groups, in the order of the prompts. ``generated``: tokens of all candidates."""

    groups: list[list[Trajectory]]
    generated: int


class Remote:
    """A darts-server, and the policy that it shapes training groups with.

    Args:
        policy: ``name``, and settings to change, as ``POST /darts/v1/rollouts`` takes them.
    """

    def __init__(self, url: str, policy: Mapping[str, object]) -> None:
        self._http = httpx.Client(base_url=f"{url}/darts/v1", timeout=TIMEOUT_SECONDS)
        self._client = Client(url, timeout=TIMEOUT_SECONDS)
        self._policy = dict(policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()
        self._client.close()

    def rollouts(self, prompts: Sequence[list[int]], group_size: int) -> Rollouts:
        """A group for each prompt, given as token ids. They are one batch: one budget, one deadline."""
        body = {
            "prompts": [{"token_ids": prompt} for prompt in prompts],
            "group_size": group_size,
            "sampling": {"temperature": 1.0, "max_tokens": MAX_RESPONSE_TOKENS, "logprobs": True},
            "policy": self._policy,
        }
        answer = self._ask("POST", "/rollouts", json=body).json()
        if failed := [group["error"] for group in answer["groups"] if group["error"]]:
            raise RuntimeError(f"{len(failed)} of {len(prompts)} groups failed; the first: {failed[0]['message']}")
        return Rollouts([_group(group) for group in answer["groups"]], answer["usage"]["generated"])

    def push(self, weights: bytes) -> None:
        """Have the server sample with these weights, a safetensors file, from now on."""
        self._ask("PUT", "/weights", content=weights)

    def samples(self, prompts: Sequence[str], count: int) -> list[list[tuple[str, int, bool]]]:
        """Unshaped answers, ``count`` to each prompt: text, length in tokens, whether it was truncated.

        vLLM alone serves them, so the server neither shapes them nor learns from them.
        """
        groups = self._client.completions(
            prompts, group_size=count, max_tokens=MAX_RESPONSE_TOKENS, policy="off", logprobs=False
        )
        return [[(t.text, len(t.token_ids), t.finish_reason == "length") for t in g.trajectories] for g in groups]

    def save(self) -> bytes:
        """Everything that the server has learned of lengths and deadlines, to keep with a checkpoint."""
        return self._ask("GET", "/state").content

    def restore(self, state: bytes) -> None:
        """Have the server know what it knew when this was saved, and nothing else."""
        self._ask("PUT", "/state", content=state)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self._http.request(method, path, **more)
        if answer.is_error:
            raise RuntimeError(f"{method} {answer.url} answered {answer.status_code}: {answer.text}")
        return answer


def _group(group: dict[str, Any]) -> list[Trajectory]:
    return [
        Trajectory(
            tokens=each["token_ids"],
            logprobs=each["logprobs"],
            text=each["text"],
            truncated=each["finish_reason"] == "length",
            weight_version=each["weight_version_start"] or 0,
        )
        for each in group["trajectories"]
    ]
