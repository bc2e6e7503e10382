"""The forms of a caller's prompts, and their JSON for the server."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal

Prompt = str | Sequence[int]
"""A prompt: text, or token ids."""

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several."""

Chat = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt with its key and metadata.

    ```python
    PromptSpec("1 + 1 =", key="sums/3", metadata={"answer": 2})
    ```

    The next four fields are vLLM's options for a chat. They override the options of the batch, and
    `chat_template_kwargs` are merged argument by argument.
    """

    prompt: str | Sequence[int] | Chat
    """Text, token ids or a chat."""
    key: str | None = None
    """Name under which the server keeps the prompt's statistics. The default is derived from the tokens."""
    metadata: Mapping[str, Any] | None = None
    """Your own data, which the group returns."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verifier: Sequence[str] | Literal[False] | None = None
    """Names of the verifiers, or False for none. The default is the choice of the batch."""


RolloutPrompt = str | Sequence[int] | Chat | PromptSpec
RolloutPrompts = RolloutPrompt | Sequence[RolloutPrompt]
"""One prompt or several."""


def list_prompts(prompts: Prompts) -> list[str | list[int]]:
    """Return a list of texts and lists of token ids.

    >>> list_prompts([1, 2, 3])
    [[1, 2, 3]]
    >>> list_prompts(["a", "b"])
    ['a', 'b']
    """
    return [prompt if isinstance(prompt, str) else as_token_ids(prompt) for prompt in _as_prompt_list(prompts)]


def list_rollout_prompts(prompts: RolloutPrompts) -> list[dict[str, Any]]:
    return [prompt_body(prompt) for prompt in _as_prompt_list(prompts)]


def iterate_prompts(prompts: Any) -> Iterator[Any]:
    """Iterate over one prompt, several prompts, or the prompts of an iterator."""
    if isinstance(prompts, Iterator):
        return prompts
    return iter(_as_prompt_list(prompts))


def prompt_body(prompt: Any) -> dict[str, Any]:
    """Return the JSON of a prompt in any form."""
    if isinstance(prompt, PromptSpec):
        options = {field.name: getattr(prompt, field.name) for field in fields(prompt) if field.name != "prompt"}
        return prompt_body(prompt.prompt) | drop_none(options)
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) and isinstance(prompt[0], Mapping):
        return {"messages": [dict(message) for message in prompt]}
    return {"token_ids": as_token_ids(prompt)}


def as_token_ids(tokens: Any) -> list[int]:
    # `index` accepts numpy's integers, which JSON does not, and rejects floats that look like token ids.
    return [operator.index(token) for token in tokens]


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _as_prompt_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | PromptSpec):
        return [prompts]
    if len(prompts) == 0:
        raise ValueError("prompts is empty")
    # A single prompt is a list of token ids, or a list of chat messages.
    if isinstance(prompts[0], Integral | Mapping):
        return [prompts]
    return list(prompts)
