"""A group as the server tells it, checked and made ours. With `stream=tokens` its tokens came before it."""

from collections.abc import Callable
from typing import Any

from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import Discarded, FinishReason, Group, Trajectory
from ._rollouts_request import RolloutsRequest
from ._translation import told_error
from ._wire import Wire

Tokens = tuple[tuple[int, ...], tuple[float, ...] | None]
"""Token ids and their log-probs."""


class ToldTrajectory(Wire):
    trajectory_id: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[FiniteFloat, ...] | None = None
    text: str
    finish_reason: FinishReason
    length: int
    rank: int
    selected_as: str | None = None
    cut: bool = False
    quality: FiniteFloat | None = None
    weight_version_start: int | None = None
    weight_version_end: int | None = None


class ToldGroup(Wire):
    number: int
    group_id: str
    prompt_key: str | None = None
    metadata: dict[str, Any] | None = None
    candidates: int
    deadline: int | None = None
    mixed_versions: bool = False
    trajectories: tuple[ToldTrajectory, ...]
    discarded: tuple[Discarded, ...] = ()
    seconds: float | None = None
    error: dict[str, Any] | None = None


def own_tokens(told: ToldTrajectory) -> Tokens:
    """The tokens that stand in the trajectory itself."""
    if told.token_ids is None:
        raise ProtocolError(f"trajectory {told.trajectory_id} has no token_ids")
    return told.token_ids, told.logprobs


def made_group(told: ToldGroup, request: RolloutsRequest, tokens: Callable[[ToldTrajectory], Tokens]) -> Group:
    """The group; ProtocolError unless it has exactly the trajectories asked for, or an error and none."""
    expected = 0 if told.error is not None else request.group_size
    if len(told.trajectories) != expected:
        raise ProtocolError(f"group {told.number} has {len(told.trajectories)} trajectories, not {expected}")
    return Group(
        group_id=told.group_id,
        prompt_token_ids=request.token_ids[told.number],
        trajectories=tuple(
            _trajectory(index, trajectory, tokens(trajectory), request.logprobs)
            for index, trajectory in enumerate(told.trajectories)
        ),
        number=told.number,
        prompt_key=told.prompt_key,
        metadata=told.metadata,
        candidates=told.candidates,
        deadline=told.deadline,
        mixed_versions=told.mixed_versions,
        discarded=told.discarded,
        seconds=told.seconds,
        error=None if told.error is None else told_error(told.error),
    )


def _trajectory(index: int, told: ToldTrajectory, tokens: Tokens, wants_logprobs: bool) -> Trajectory:
    token_ids, logprobs = tokens
    name = f"trajectory {told.trajectory_id}"
    if len(token_ids) != told.length:
        raise ProtocolError(f"{name} has {len(token_ids)} tokens but says {told.length}")
    if wants_logprobs and (logprobs is None or len(logprobs) != told.length):
        have = "no" if logprobs is None else len(logprobs)
        raise ProtocolError(f"{name} has {told.length} tokens but {have} logprobs")
    return Trajectory(
        index=index,
        text=told.text,
        token_ids=token_ids,
        logprobs=logprobs if wants_logprobs else None,
        finish_reason=told.finish_reason,
        trajectory_id=told.trajectory_id,
        rank=told.rank,
        selected_as=told.selected_as,
        cut=told.cut,
        quality=told.quality,
        weight_version_start=told.weight_version_start,
        weight_version_end=told.weight_version_end,
    )
