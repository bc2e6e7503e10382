"""Answers in, models out. A wrong group ruins a training run without a sign, so everything that can be checked is."""

from collections.abc import Sequence

import httpx
from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import FinishReason, Group, Trajectory
from ._requests import CompletionRequest
from ._wire import Wire, parsed


class _Model(Wire):
    id: str


class _ModelList(Wire):
    data: list[_Model]


class _Logprobs(Wire):
    token_logprobs: tuple[FiniteFloat, ...]


class _Choice(Wire):
    index: int
    text: str
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    logprobs: _Logprobs | None = None


class _Completion(Wire):
    id: str | None = None
    choices: list[_Choice]


# By these alone has a trajectory ended by itself; an aborted one, for instance, is a piece of one.
_FINISHED: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


def parse_models(response: httpx.Response) -> list[str]:
    """The ids of `/v1/models`, in the server's order."""
    return [model.id for model in parsed(_ModelList, response.content, response.url.path).data]


def first_model(models: Sequence[str]) -> str:
    if not models:
        raise ProtocolError("the server lists no model, and none was named")
    return models[0]


def parse_groups(request: CompletionRequest, response: httpx.Response) -> list[Group]:
    """One group a prompt, in the order of the prompts.

    Raises ProtocolError unless each has exactly the choices asked for, each of them finished and complete.
    """
    completion = parsed(_Completion, response.content, response.url.path)
    group_id = response.headers.get("X-Darts-Group-Id") or completion.id
    choices = _in_order(completion.choices, prompts=len(request.prompts), group_size=request.group_size)
    return [
        Group(
            group_id=group_id,
            prompt_token_ids=_prompt_token_ids(request, position, members),
            trajectories=tuple(_trajectory(k, choice, request.logprobs) for k, choice in enumerate(members)),
            number=position,
        )
        for position, members in enumerate(choices)
    ]


def _in_order(choices: list[_Choice], *, prompts: int, group_size: int) -> list[list[_Choice]]:
    """The choices of each prompt; the server counts them through, `index = prompt * group_size + k`."""
    expected = prompts * group_size
    if len(choices) != expected:
        raise ProtocolError(f"{prompts} prompt(s) with {group_size} choices each make {expected}, got {len(choices)}")
    by_index: dict[int, _Choice] = {}
    for choice in choices:
        if not 0 <= choice.index < expected:
            raise ProtocolError(f"choice {choice.index} is not among 0..{expected - 1}")
        if choice.index in by_index:
            raise ProtocolError(f"choice {choice.index} appears twice")
        by_index[choice.index] = choice
    return [[by_index[start + k] for k in range(group_size)] for start in range(0, expected, group_size)]


def _prompt_token_ids(request: CompletionRequest, position: int, members: list[_Choice]) -> tuple[int, ...] | None:
    """The prompt that all members answer.

    Choices are counted through, so one too few here and one too many there would move answers to another prompt's
    group with no gap in the indices; the prompt's own tokens show it.
    """
    token_ids = members[0].prompt_token_ids
    if any(choice.prompt_token_ids != token_ids for choice in members):
        raise ProtocolError(f"the choices of prompt {position} answer different prompts")
    asked = request.prompts[position]
    if token_ids is None or isinstance(asked, str) or "truncate_prompt_tokens" in request.body:
        return token_ids
    if token_ids != tuple(asked):
        raise ProtocolError(f"the choices of prompt {position} answer another prompt")
    return token_ids


def _trajectory(k: int, choice: _Choice, wants_logprobs: bool) -> Trajectory:
    name = f"choice {choice.index}"
    if choice.finish_reason not in _FINISHED:
        raise ProtocolError(f"{name} ended with {choice.finish_reason!r}, not with stop or length")
    if choice.token_ids is None:
        raise ProtocolError(f"{name} has no token_ids; the server did not honour return_token_ids")
    logprobs = None
    if wants_logprobs:
        if choice.logprobs is None:
            raise ProtocolError(f"{name} has no logprobs")
        logprobs = choice.logprobs.token_logprobs
        if len(logprobs) != len(choice.token_ids):
            raise ProtocolError(f"{name} has {len(choice.token_ids)} tokens but {len(logprobs)} logprobs")
    return Trajectory(k, choice.text, choice.token_ids, logprobs, _FINISHED[choice.finish_reason])
