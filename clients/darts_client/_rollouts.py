"""`/darts/v1/rollouts`: requests are built, and the groups of its answers are checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal
from uuid import uuid4

from pydantic import FiniteFloat

from ._errors import ProtocolError, error_from_object
from ._models import AbortedTrajectory, Discarded, FinishReason, Group, Logprobs, TokenIds, Trajectory, WireModel
from ._prompts import RolloutPrompts, drop_none, list_rollout_prompts

Stream = Literal["groups", "tokens"] | None
"""How a batch is answered; None for one answer."""
Carry = Literal["drop", "restart", "resume"]
"""What happens to prompts that are not decided when `num_groups` others are."""
Tokens = tuple[tuple[int, ...], tuple[float, ...] | None]
"""Token ids and their log-probs."""


@dataclass(frozen=True, slots=True)
class RolloutsRequest:
    """A request, and what its events are checked against.

    `token_ids`: of each prompt, None where the prompt came in another form. `num_groups`: how many groups complete the
    batch. `carried`: prompts that the server has kept may be added. `idempotency_key`: makes the batch durable.
    """

    token_ids: tuple[tuple[int, ...] | None, ...]
    num_groups: int
    group_size: int
    logprobs: bool
    stream: Stream
    content: bytes
    idempotency_key: str | None
    carried: bool = False


class TrajectoryPayload(WireModel):
    """A trajectory in a `group` event; in a token stream its tokens came before, in `delta` events."""

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
    counted: int | None = None
    num_shortest: int | None = None
    sampled_from: int | None = None
    earlier_pass_rate: FiniteFloat | None = None
    deadline: int | None = None
    mixed_versions: bool = False
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
    budget: int | None = None,
    num_groups: int | None = None,
    survivors: bool | None = None,
    carry: Carry | None = None,
    carried: bool = False,
    logprobs: bool = True,
    durable: bool = True,
    idempotency_key: str | None = None,
    chunk_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    **sampling: Any,
) -> RolloutsRequest:
    """Build one request for all of `prompts`. The arguments are those of the clients' `rollouts`."""
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if idempotency_key is not None and not durable:
        raise ValueError("idempotency_key makes a batch durable; leave durable=False out")
    prompt_list = [] if carried and isinstance(prompts, list | tuple) and not prompts else list_rollout_prompts(prompts)
    own_sampling = {"temperature": temperature, "seed": seed, "logprobs": logprobs or None}
    options = {
        "policy": {"name": policy} if isinstance(policy, str) else policy,
        "budget": budget,
        "num_groups": num_groups,
        "survivors": survivors,
        "carry": carry,
        "carried": carried or None,
        "chunk_tokens": chunk_tokens,
        "chat_template_kwargs": chat_template_kwargs,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    body = {
        "prompts": prompt_list,
        "group_size": group_size,
        "sampling": {"max_tokens": max_tokens} | drop_none(own_sampling) | sampling,
        **drop_none({"stream": stream, **options}),
    }
    return RolloutsRequest(
        token_ids=tuple(tuple(p["token_ids"]) if "token_ids" in p else None for p in prompt_list),
        num_groups=len(prompt_list) if num_groups is None else num_groups,
        group_size=group_size,
        logprobs=logprobs,
        stream=stream,
        content=json.dumps(body, allow_nan=False, separators=(",", ":")).encode(),
        idempotency_key=(idempotency_key or uuid4().hex) if durable else None,
        carried=carried,
    )


def tokens_in_payload(payload: TrajectoryPayload) -> Tokens:
    """Return the tokens that the payload itself contains."""
    if payload.token_ids is None:
        raise ProtocolError(f"trajectory {payload.trajectory_id} has no token_ids")
    return payload.token_ids, payload.logprobs


def build_group(
    payload: GroupPayload,
    request: RolloutsRequest,
    tokens: Callable[[TrajectoryPayload], Tokens],
    survivors: bool = False,
) -> Group:
    """Build the group; raise ProtocolError unless it has exactly `group_size` trajectories, or an error and none.

    `survivors`: it has all that were not pruned, at least one.
    """
    expected = 0 if payload.error is not None else request.group_size
    found = len(payload.trajectories)
    if found != expected and not (survivors and found > 0 < expected):
        raise ProtocolError(f"group {payload.number} has {found} trajectories, not {expected}")
    same = {name: getattr(payload, name) for name in _SAME_OF_GROUP}
    return Group(
        **same,
        prompt_token_ids=request.token_ids[payload.number] if payload.number < len(request.token_ids) else None,
        trajectories=tuple(
            _trajectory(index, trajectory, tokens(trajectory), request.logprobs)
            for index, trajectory in enumerate(payload.trajectories)
        ),
        error=None if payload.error is None else error_from_object(payload.error),
        aborted=payload.aborted or (),
    )


def _trajectory(index: int, payload: TrajectoryPayload, tokens: Tokens, with_logprobs: bool) -> Trajectory:
    token_ids, logprobs = tokens
    name = f"trajectory {payload.trajectory_id}"
    if len(token_ids) != payload.length:
        raise ProtocolError(f"{name} has {len(token_ids)} tokens, but its length is {payload.length}")
    if with_logprobs and (logprobs is None or len(logprobs) != payload.length):
        count = "no" if logprobs is None else len(logprobs)
        raise ProtocolError(f"{name} has {payload.length} tokens but {count} logprobs")
    same = {name: getattr(payload, name) for name in _SAME_OF_TRAJECTORY}
    return Trajectory(index=index, token_ids=token_ids, logprobs=logprobs if with_logprobs else None, **same)


def _same_fields(payload: type[WireModel], made: type[Group | Trajectory], *without: str) -> list[str]:
    """Return the fields that an object has from its event as they are."""
    return [field.name for field in fields(made) if field.name in payload.model_fields and field.name not in without]


_SAME_OF_GROUP = _same_fields(GroupPayload, Group, "trajectories", "error", "aborted")
_SAME_OF_TRAJECTORY = _same_fields(TrajectoryPayload, Trajectory, "token_ids", "logprobs")
