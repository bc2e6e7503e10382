"""The forms in which a caller may pass prompts, as JSON for the server."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

Prompt = str | Sequence[int]
"""A prompt: text, or token ids."""

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several."""

Chat = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt (text, token ids or a chat) with its key and metadata.

    `key`: the name that its statistics are kept under; by default derived from its tokens. `metadata` is returned with
    the group. The other fields are vLLM's, for a chat: they override the batch's options;
    `chat_template_kwargs` are merged argument by argument.
    """

    prompt: str | Sequence[int] | Chat
    key: str | None = None
    metadata: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


RolloutPrompt = str | Sequence[int] | Chat | PromptSpec
RolloutPrompts = RolloutPrompt | Sequence[RolloutPrompt]
"""One prompt or several."""


def list_prompts(prompts: Prompts) -> list[str | list[int]]:
    """Return one prompt or several as a list of texts and lists of token ids.

    >>> list_prompts([1, 2, 3])
    [[1, 2, 3]]
    >>> list_prompts(["a", "b"])
    ['a', 'b']
    """
    return [prompt if isinstance(prompt, str) else as_token_ids(prompt) for prompt in _as_list(prompts)]


def list_rollout_prompts(prompts: RolloutPrompts) -> list[dict[str, Any]]:
    """Return one prompt or several as `/darts/v1/rollouts` takes them."""
    return [prompt_body(prompt) for prompt in _as_list(prompts)]


def iterate_prompts(prompts: Any) -> Iterator[Any]:
    """Iterate over one prompt or several, or over what an iterator yields."""
    return prompts if isinstance(prompts, Iterator) else iter(_as_list(prompts))


def prompt_body(prompt: Any) -> dict[str, Any]:
    """Return the JSON of a prompt in any form."""
    if isinstance(prompt, PromptSpec):
        others = {field.name: getattr(prompt, field.name) for field in fields(prompt) if field.name != "prompt"}
        return prompt_body(prompt.prompt) | drop_none(others)
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) and isinstance(prompt[0], Mapping):
        return {"messages": [dict(message) for message in prompt]}
    return {"token_ids": as_token_ids(prompt)}


def as_token_ids(tokens: Any) -> list[int]:
    """Convert to plain integers; raise TypeError for anything else."""
    # `index` accepts numpy's integers as well, which JSON does not, and rejects floats that look like token ids.
    return [operator.index(token) for token in tokens]


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | PromptSpec):
        return [prompts]
    if len(prompts) == 0:
        raise ValueError("prompts is empty")
    return [prompts] if isinstance(prompts[0], Integral | Mapping) else list(prompts)
