"""Arguments in, the body and the headers of `/v1/completions` out."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

Prompt = str | Sequence[int]
"""A prompt: text, or token ids."""

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several."""

# The names that the client itself puts into the body, and the parser relies on.
_RESERVED = frozenset({"prompt", "n", "stream", "return_token_ids"})


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request, and what its answer is checked against."""

    prompts: tuple[str | list[int], ...]
    group_size: int
    logprobs: bool
    body: dict[str, Any]
    headers: dict[str, str]


def split_prompts(prompts: Prompts) -> list[str | list[int]]:
    """The prompts as a list, whatever form they came in.

    >>> split_prompts([1, 2, 3])
    [[1, 2, 3]]
    >>> split_prompts(["a", "b"])
    ['a', 'b']
    """
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) == 0:
        raise ValueError("prompts is empty")
    if isinstance(prompts[0], Integral):
        return [as_token_ids(prompts)]
    return [prompt if isinstance(prompt, str) else as_token_ids(prompt) for prompt in prompts]


def completion_request(
    prompts: Prompts,
    *,
    model: str,
    group_size: int,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    policy: str | None,
    logprobs: bool,
    sampling: Mapping[str, object],
) -> CompletionRequest:
    """One request for all of `prompts`."""
    listed = split_prompts(prompts)
    if len({type(prompt) for prompt in listed}) > 1:
        raise ValueError("one request takes text prompts or token ids, not both")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if clash := _RESERVED & sampling.keys():
        raise ValueError(f"the client sets {', '.join(sorted(clash))} itself")

    body: dict[str, Any] = {
        "model": model,
        "prompt": listed,
        "n": group_size,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
        **sampling,
    }
    if seed is not None:
        body["seed"] = seed
    if logprobs:
        body["logprobs"] = 0  # the sampled token's alone
    headers = {} if policy is None else {"X-Darts-Policy": policy}
    return CompletionRequest(tuple(listed), group_size, logprobs, body, headers)


def as_token_ids(tokens: Any) -> list[int]:
    """Plain integers; TypeError for anything that is none."""
    # `index` takes numpy's integers as well, which JSON does not, and refuses what only looks like a token id.
    return [operator.index(token) for token in tokens]
