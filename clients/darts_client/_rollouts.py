"""`/darts/v1/rollouts`: builds requests, and checks the groups of answers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field, FiniteFloat

from ._errors import ProtocolError, error_from_object
from ._models import AbortedTrajectory, Discarded, FinishReason, Group, Logprobs, TokenIds, Trajectory, WireModel
from ._prompts import RolloutPrompts, drop_none, list_rollout_prompts

Stream = Literal["groups", "tokens"] | None
"""Events of a batch's stream, or None for one answer without a stream."""
Carry = Literal["drop", "restart", "resume"]
"""Fate of the prompts that are still running when `num_groups` groups are complete."""
Tokens = tuple[tuple[int, ...], tuple[float, ...] | None]
"""Token ids and their log-probs."""


BATCH_OPTIONS = frozenset(
    {
        "budget",
        "survivors",
        "carry",
        "verifier",
        "only",
        "max_prompts",
        "stop_when",
        "chunk_tokens",
        "chat_template_kwargs",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Options of a batch that are sent as they are."""


@dataclass(frozen=True, slots=True)
class RolloutsRequest:
    """A request, with the values that its answer is checked against."""

    token_ids: tuple[tuple[int, ...] | None, ...]
    """Token ids of each prompt, or None for a text or a chat."""
    num_groups: int
    """Number of groups that complete the batch."""
    group_size: int
    logprobs: bool
    stream: Stream
    content: bytes
    idempotency_key: str | None
    """Key of a durable batch, or None."""
    carried: bool = False
    """Whether the server may add prompts that it has kept."""


class TrajectoryPayload(WireModel):
    """A trajectory in a `group` event. In a token stream, `delta` events have sent its tokens before."""

    trajectory_id: str
    token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    text: str
    finish_reason: FinishReason
    length: int
    rank: int
    selected_as: str | None = None
    cut: bool = False
    quality: FiniteFloat | None = None
    weight: FiniteFloat | None = None
    reward: FiniteFloat | None = None
    correct: bool | None = None
    advantage: FiniteFloat | None = None
    weight_version_start: int | None = None
    weight_version_end: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()


class GroupPayload(WireModel):
    """The `group` event."""

    number: int
    group_id: str
    prompt_key: str | None = None
    metadata: dict[str, Any] | None = None
    candidates: int
    num_eligible: int | None = None
    num_shortest: int | None = None
    sampled_from: int | None = None
    earlier_pass_rate: FiniteFloat | None = None
    deadline: int | None = None
    mixed_versions: bool = False
    num_rewarded: int | None = None
    zero_variance: bool | None = None
    decided_early: bool = False
    run_probability: FiniteFloat | None = Field(None, gt=0)
    aborted: tuple[AbortedTrajectory, ...] | None = None
    trajectories: tuple[TrajectoryPayload, ...]
    discarded: tuple[Discarded, ...] = ()
    seconds: float | None = None
    error: dict[str, Any] | None = None


def rollouts_request(
    prompts: RolloutPrompts,
    stream: Stream,
    /,
    *,
    group_size: int,
    max_tokens: int | None,
    temperature: float = 1.0,
    seed: int | None = None,
    policy: str | Mapping[str, Any] | None = None,
    num_groups: int | None = None,
    carried: bool = False,
    return_zero_variance: bool = False,
    logprobs: bool = True,
    durable: bool = True,
    idempotency_key: str | None = None,
    **options_and_sampling: Any,
) -> RolloutsRequest:
    """Build the request from the arguments of `Client.rollouts`."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if idempotency_key is not None and not durable:
        raise ValueError("idempotency_key makes a batch durable; leave durable=False out")
    # The server keeps a batch with a key if its connection is lost.
    if durable and not idempotency_key:
        idempotency_key = uuid4().hex

    # With `carried`, a batch may consist of kept prompts alone.
    is_empty = isinstance(prompts, list | tuple) and not prompts
    prompt_list = [] if carried and is_empty else list_rollout_prompts(prompts)
    options: dict[str, Any] = {
        "stream": stream,
        "policy": {"name": policy} if isinstance(policy, str) else policy,
        "num_groups": num_groups,
        "carried": carried or None,
        "return_zero_variance": return_zero_variance or None,
    }
    # `max_tokens` is sent even if it is None, which allows all tokens of the model's length.
    sampling: dict[str, Any] = {"max_tokens": max_tokens}
    sampling |= drop_none({"temperature": temperature, "seed": seed, "logprobs": logprobs or None})
    for name, value in options_and_sampling.items():
        if name in BATCH_OPTIONS:
            options[name] = value
        else:
            sampling[name] = value
    body = {"prompts": prompt_list, "group_size": group_size, "sampling": sampling, **drop_none(options)}

    token_ids = [prompt.get("token_ids") for prompt in prompt_list]
    return RolloutsRequest(
        token_ids=tuple(None if ids is None else tuple(ids) for ids in token_ids),
        num_groups=len(prompt_list) if num_groups is None else num_groups,
        group_size=group_size,
        logprobs=logprobs,
        stream=stream,
        content=json.dumps(body, allow_nan=False, separators=(",", ":")).encode(),
        idempotency_key=idempotency_key,
        carried=carried,
    )


def tokens_in_payload(payload: TrajectoryPayload) -> Tokens:
    if payload.token_ids is None:
        raise ProtocolError(f"trajectory {payload.trajectory_id} has no token_ids")
    return payload.token_ids, payload.logprobs


def build_group(
    payload: GroupPayload,
    request: RolloutsRequest,
    tokens_of: Callable[[TrajectoryPayload], Tokens],
    returns_survivors: bool,
) -> Group:
    """Build a group with exactly `group_size` trajectories, or with an error and none.

    Args:
        returns_survivors: whether the group has all unpruned trajectories, at least one, instead of `group_size`.

    Raises:
        ProtocolError: the group has another number of trajectories, or a trajectory is not complete.
    """
    expected_size = 0 if payload.error is not None else request.group_size
    size = len(payload.trajectories)
    may_differ = returns_survivors and payload.error is None and size > 0
    if size != expected_size and not may_differ:
        raise ProtocolError(f"group {payload.number} has {size} trajectories, not {expected_size}")

    prompt_token_ids = None
    # Prompts that the server has kept are numbered after the request's prompts.
    if payload.number < len(request.token_ids):
        prompt_token_ids = request.token_ids[payload.number]
    trajectories = [
        _build_trajectory(index, trajectory, tokens_of(trajectory), request.logprobs)
        for index, trajectory in enumerate(payload.trajectories)
    ]
    copied_fields = {name: getattr(payload, name) for name in _COPIED_TO_GROUP}
    return Group(
        **copied_fields,
        prompt_token_ids=prompt_token_ids,
        trajectories=tuple(trajectories),
        error=None if payload.error is None else error_from_object(payload.error),
        aborted=payload.aborted or (),
    )


def _build_trajectory(
    index: int,
    payload: TrajectoryPayload,
    tokens: Tokens,
    with_logprobs: bool,
) -> Trajectory:
    token_ids, logprobs = tokens
    name = f"trajectory {payload.trajectory_id}"
    if len(token_ids) != payload.length:
        raise ProtocolError(f"{name} has {len(token_ids)} tokens, but its length is {payload.length}")
    if not with_logprobs:
        logprobs = None
    elif logprobs is None or len(logprobs) != payload.length:
        count = "no" if logprobs is None else len(logprobs)
        raise ProtocolError(f"{name} has {payload.length} tokens but {count} logprobs")
    copied_fields = {name: getattr(payload, name) for name in _COPIED_TO_TRAJECTORY}
    return Trajectory(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        **copied_fields,
    )


def _find_copied_fields(
    payload_class: type[WireModel],
    result_class: type[Group | Trajectory],
    converted_fields: set[str],
) -> list[str]:
    names = [field.name for field in fields(result_class)]
    return [name for name in names if name in payload_class.model_fields and name not in converted_fields]


_COPIED_TO_GROUP = _find_copied_fields(GroupPayload, Group, {"trajectories", "error", "aborted"})
_COPIED_TO_TRAJECTORY = _find_copied_fields(TrajectoryPayload, Trajectory, {"token_ids", "logprobs"})
