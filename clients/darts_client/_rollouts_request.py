"""Arguments in, the body and the headers of `/darts/v1/rollouts` out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal
from uuid import uuid4

from ._requests import as_token_ids

Chat = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt (text, token ids or a chat) with what goes with it.

    `key`: the name that its lengths are remembered under, its tokens if left out. `metadata` comes back with the group.
    """

    prompt: str | Sequence[int] | Chat
    key: str | None = None
    metadata: Mapping[str, Any] | None = None


RolloutPrompt = str | Sequence[int] | Chat | PromptSpec
RolloutPrompts = RolloutPrompt | Sequence[RolloutPrompt]
"""One prompt or several."""


@dataclass(frozen=True, slots=True)
class RolloutsRequest:
    """A request, and what its events are checked against.

    `token_ids`: of each prompt, None where it was given in another form. `wanted`: groups that are waited for. `key`:
    makes the batch durable.
    """

    token_ids: tuple[tuple[int, ...] | None, ...]
    wanted: int
    group_size: int
    logprobs: bool
    stream: Literal["groups", "tokens"]
    content: bytes
    key: str | None


def rollouts_request(
    prompts: RolloutPrompts,
    *,
    group_size: int,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    logprobs: bool,
    sampling: Mapping[str, Any],
    policy: str | Mapping[str, Any] | None,
    budget: int | None,
    num_groups: int | None,
    chunk_tokens: int | None,
    durable: bool,
    idempotency_key: str | None,
) -> RolloutsRequest:
    """One request for all of `prompts`; by tokens if `chunk_tokens` is given, else by groups."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if idempotency_key is not None and not durable:
        raise ValueError("idempotency_key makes a batch durable; leave durable=False out")
    listed = [prompt_body(prompt) for prompt in _split(prompts)]
    stream: Literal["groups", "tokens"] = "groups" if chunk_tokens is None else "tokens"
    plain = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": logprobs or None}
    options = {
        "policy": {"name": policy} if isinstance(policy, str) else policy,
        "budget": budget,
        "num_groups": num_groups,
        "chunk_tokens": chunk_tokens,
    }
    body = {
        "prompts": listed,
        "group_size": group_size,
        "sampling": given(plain) | dict(sampling),
        "stream": stream,
        **given(options),
    }
    return RolloutsRequest(
        token_ids=tuple(tuple(p["token_ids"]) if "token_ids" in p else None for p in listed),
        wanted=len(listed) if num_groups is None else num_groups,
        group_size=group_size,
        logprobs=logprobs,
        stream=stream,
        content=json.dumps(body, allow_nan=False, separators=(",", ":")).encode(),
        key=(idempotency_key or uuid4().hex) if durable else None,
    )


def _split(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | PromptSpec):
        return [prompts]
    if len(prompts) == 0:
        raise ValueError("prompts is empty")
    return [prompts] if isinstance(prompts[0], Integral | Mapping) else list(prompts)


def prompt_body(prompt: Any) -> dict[str, Any]:
    """The prompt as the server takes it, in whatever form it came."""
    if isinstance(prompt, PromptSpec):
        return prompt_body(prompt.prompt) | given({"key": prompt.key, "metadata": prompt.metadata})
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) and isinstance(prompt[0], Mapping):
        return {"messages": [dict(message) for message in prompt]}
    return {"token_ids": as_token_ids(prompt)}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that were given."""
    return {name: value for name, value in values.items() if value is not None}
