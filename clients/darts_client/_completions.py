"""`/v1/completions` and `/v1/models`: builds requests and checks answers.

A wrong group would silently spoil a training run, so everything is checked that can be checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import FinishReason, Group, Trajectory, WireModel, parse_response
from ._prompts import Prompts, list_prompts

# The client sets these parameters, and the parser relies on them.
_RESERVED = frozenset({"prompt", "n", "stream", "return_token_ids"})

# Without them vLLM's route uses the model's `generation_config`, such as `top_k=20`.
NEUTRAL_SAMPLING: dict[str, object] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# A trajectory with any other finish reason, such as "abort", is incomplete.
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request, with the values that its answer is checked against."""

    prompts: tuple[str | list[int], ...]
    group_size: int
    logprobs: bool
    body: dict[str, Any]
    headers: dict[str, str]


class _Model(WireModel):
    id: str


class _ModelList(WireModel):
    data: list[_Model]


class ChoiceLogprobs(WireModel):
    token_logprobs: tuple[FiniteFloat, ...]


class _Choice(WireModel):
    index: int
    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: ChoiceLogprobs | None = None


class _Completion(WireModel):
    id: str | None = None
    choices: list[_Choice]


def completion_request(
    prompts: Prompts,
    *,
    model: str,
    group_size: int,
    policy: str | None,
    logprobs: bool,
    sampling: Mapping[str, object],
) -> CompletionRequest:
    prompt_list = list_prompts(prompts)
    types = {type(prompt) for prompt in prompt_list}
    if len(types) > 1:
        raise ValueError("one request takes text prompts or token ids, not both")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if reserved := _RESERVED & sampling.keys():
        raise ValueError(f"the client itself sets {', '.join(sorted(reserved))}")

    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_list,
        "n": group_size,
        "return_token_ids": True,
        **NEUTRAL_SAMPLING,
        **sampling,
    }
    if logprobs:
        # 0 requests the log-probs of the sampled tokens alone.
        body["logprobs"] = 0
    headers = {} if policy is None else {"X-Darts-Policy": policy}
    return CompletionRequest(tuple(prompt_list), group_size, logprobs, body, headers)


def parse_models(response: httpx.Response) -> list[str]:
    return [model.id for model in parse_response(_ModelList, response).data]


def first_model(models: Sequence[str]) -> str:
    if not models:
        raise ProtocolError("the server lists no model; name a model")
    return models[0]


def parse_groups(request: CompletionRequest, response: httpx.Response) -> list[Group]:
    """Return one group for each prompt, in the order of the prompts.

    Raises:
        ProtocolError: a group does not have exactly the requested number of choices, or a choice is not complete.
    """
    completion = parse_response(_Completion, response)
    # Plain vLLM sends no such header.
    group_id = response.headers.get("X-Darts-Group-Id") or completion.id
    choices_by_prompt = _split_by_prompt(completion.choices, len(request.prompts), request.group_size)
    groups = []
    for number, choices in enumerate(choices_by_prompt):
        prompt_token_ids = _checked_prompt_tokens(request, number, choices)
        trajectories = [_build_trajectory(index, choice, request.logprobs) for index, choice in enumerate(choices)]
        groups.append(Group(group_id, prompt_token_ids, tuple(trajectories), number))
    return groups


def _split_by_prompt(choices: list[_Choice], num_prompts: int, group_size: int) -> list[list[_Choice]]:
    expected = num_prompts * group_size
    if len(choices) != expected:
        raise ProtocolError(f"expected {expected} choices, {group_size} for each prompt, got {len(choices)}")
    by_index: dict[int, _Choice] = {}
    for choice in choices:
        if not 0 <= choice.index < expected:
            raise ProtocolError(f"choice {choice.index} is not among 0..{expected - 1}")
        if choice.index in by_index:
            raise ProtocolError(f"choice {choice.index} appears twice")
        by_index[choice.index] = choice
    # The index of a choice is `number of its prompt * group_size + index within the group`.
    ordered = [by_index[index] for index in range(expected)]
    return [ordered[start : start + group_size] for start in range(0, expected, group_size)]


def _checked_prompt_tokens(request: CompletionRequest, number: int, choices: list[_Choice]) -> tuple[int, ...] | None:
    # Only its index links a choice to its prompt. If a prompt had a choice too few, and the next prompt a choice too
    # many, an answer would be in the wrong group. The prompt's tokens reveal that.
    token_ids = choices[0].prompt_token_ids
    if any(choice.prompt_token_ids != token_ids for choice in choices):
        raise ProtocolError(f"the choices of prompt {number} answer different prompts")
    prompt = request.prompts[number]
    can_compare = token_ids is not None and not isinstance(prompt, str)
    if can_compare and "truncate_prompt_tokens" not in request.body and token_ids != tuple(prompt):
        raise ProtocolError(f"the choices of prompt {number} answer another prompt")
    return token_ids


def _build_trajectory(index: int, choice: _Choice, with_logprobs: bool) -> Trajectory:
    name = f"choice {choice.index}"
    if choice.finish_reason not in _FINISH_REASONS:
        raise ProtocolError(f"{name} has finish reason {choice.finish_reason!r}, not stop or length")
    if choice.token_ids is None:
        raise ProtocolError(f"{name} has no token_ids; the server ignored return_token_ids")
    logprobs = None
    if with_logprobs:
        if choice.logprobs is None:
            raise ProtocolError(f"{name} has no logprobs")
        logprobs = choice.logprobs.token_logprobs
        if len(logprobs) != len(choice.token_ids):
            raise ProtocolError(f"{name} has {len(choice.token_ids)} tokens but {len(logprobs)} logprobs")
    return Trajectory(index, choice.text, choice.token_ids, logprobs, _FINISH_REASONS[choice.finish_reason])
