"""What a caller gets: groups of trajectories, and the events of a stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, ValidationInfo, WrapValidator

from ._errors import ProtocolError, StatusError

FinishReason = Literal["stop", "length"]


class WireModel(BaseModel):
    """Part of an answer. Unknown fields, of a later server, are ignored; a wrong type is not converted."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], content: str | bytes, source: str, rows: Any = None) -> ModelT:
    """Parse JSON; raise ProtocolError, with `source` and the field in its message, if it does not fit the model.

    With `rows`, which are `TokenRows`, it has the number of a row in place of each list of tokens, and of log-probs.
    """
    try:
        return model.model_validate_json(content, context=rows)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        field_path = ".".join(str(part) for part in first["loc"]) or "body"
        raise ProtocolError(f"{source}: {field_path}: {first['msg']}") from exc


def parse_response(model: type[ModelT], response: httpx.Response) -> ModelT:
    """Parse the body of a response, as `parse` does."""
    return parse(model, response.content, response.url.path)


def _list_or_row(name: str) -> WrapValidator:
    def read(value: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if info.context is not None:
            return getattr(info.context, name)(value)
        return handler(tuple(value) if isinstance(value, list) else value)  # a parsed list is not strictly a tuple

    return WrapValidator(read)


TokenIds = Annotated[tuple[int, ...], _list_or_row("token_ids")]
Logprobs = Annotated[tuple[FiniteFloat, ...], _list_or_row("logprobs")]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of a prompt.

    `token_ids` are the generated tokens, without the prompt. `logprobs` holds the natural log-probability of each of
    them, so it is as long as `token_ids`; it is None when none were requested. `index` counts from 0 within the group.

    The other fields are set for rollouts only. `trajectory_id` is its name for rewards. `rank` is its place in the
    group by length, 0 for the shortest; `selected_as` is the rule that selected it (`short`, `long`, `long_truncated`,
    `fill`; `survivor` if it was not pruned, whatever its length). `cut`: it was cut at the group's `deadline`.
    `quality` is the probability of a correct answer that was predicted while it ran; None if it was not scored.
    `weight` is 1 / (its probability to be returned, given all candidates of its group); None where some candidates can
    never be returned. The versions are those of the model's weights at its start and at its end. `version_spans`: those
    that sampled its tokens, in their order, each with its number of tokens.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    trajectory_id: str | None = None
    rank: int | None = None
    selected_as: str | None = None
    cut: bool = False
    quality: float | None = None
    weight: float | None = None
    weight_version_start: int | None = None
    weight_version_end: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)


class AbortedTrajectory(WireModel):
    """What a trajectory had generated when its group was aborted. `logprobs` are None when none were requested.

    `finish_reason` is "abort" unless it had finished before its group was aborted. `cut`: it was cut at the group's
    deadline. `version_spans`: the weights that sampled its tokens, in their order, each with its number of tokens.
    """

    trajectory_id: str
    token_ids: TokenIds
    logprobs: Logprobs | None
    text: str
    finish_reason: Literal["abort", "stop", "length"]
    weight_version_start: int | None = None
    weight_version_end: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    cut: bool = False


class Discarded(WireModel):
    """A candidate that was not returned: the tokens it had generated, and the reason."""

    trajectory_id: str
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt, in the order of their index: exactly `group_size`, or all survivors of pruning.

    `prompt_token_ids` is None when the server did not return them; for rollouts, when the caller did not send them.
    `group_id` is the server's name for the group; the groups of one OpenAI-style request share it. `number` is the
    index of the prompt in the request.

    The other fields are set for rollouts only. `prompt_key` is the name that the prompt's statistics are kept under,
    `metadata` what the caller sent with it. `candidates` is how many were started, `counted` how many of
    them the weights stand for (N: not those that failed, or ran before a restart). `num_shortest` is how many places
    went to the shortest (K) where the others were sampled from the rest, else None; `sampled_from` (S) is of how many
    that were not pruned the trajectories are a sample, else None; `earlier_pass_rate` is the share of right ones among
    the prompt's trajectories that had rewards when the group started, None without any; `deadline` is the length in
    tokens at which the tail was cut. `seconds` is the duration.
    `error`: why the group failed; then it has no trajectories. `aborted`: of a group that was aborted, or that ran when
    the server stopped, what its candidates had generated; they are no group, as none of them was selected.
    """

    group_id: str | None
    prompt_token_ids: tuple[int, ...] | None
    trajectories: tuple[Trajectory, ...]
    number: int = 0
    prompt_key: str | None = None
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    candidates: int | None = None
    counted: int | None = None
    num_shortest: int | None = None
    sampled_from: int | None = None
    earlier_pass_rate: float | None = None
    deadline: int | None = None
    mixed_versions: bool = False
    discarded: tuple[Discarded, ...] = ()
    seconds: float | None = None
    error: StatusError | None = None
    aborted: tuple[AbortedTrajectory, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Generated tokens of each trajectory."""
        return tuple(len(trajectory.token_ids) for trajectory in self.trajectories)


class Usage(WireModel):
    """Tokens of a batch, and its duration in seconds."""

    generated: int
    returned: int
    wasted: int
    seconds: float


class Unfinished(WireModel):
    """A prompt whose group was not among the first `num_groups`, or was aborted while its batch carries prompts over.

    `carry`: "drop": submit it again with the next step; otherwise the server keeps it, see `carried` of `rollouts`.
    `error`: why it was aborted, OpenAI's error object; None if enough others were complete. `aborted`: what its
    trajectories had generated, if the server stopped and could not keep it: the prompt starts again.
    """

    number: int
    prompt_key: str | None
    metadata: dict[str, Any] | None
    carry: str = "drop"
    error: dict[str, Any] | None = None
    aborted: tuple[AbortedTrajectory, ...] | None = None


class Delta(WireModel):
    """New tokens, from position `start`, of a candidate that may still be selected. `number` is its prompt's index.

    `logprobs` are those of these tokens, None if they were not requested.
    """

    trajectory_id: str
    number: int
    start: int
    token_ids: TokenIds
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class TrajectoryEvent:
    """A candidate was selected; all of its tokens. If it was `cut`, its deltas may have gone further."""

    trajectory_id: str
    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    cut: bool


class Discard(WireModel):
    """A candidate was discarded, for this reason; no event of it follows."""

    trajectory_id: str
    number: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """A group is complete, or has failed with its `error`."""

    group: Group


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the batch."""

    usage: Usage
    unfinished: tuple[Unfinished, ...]


Event = Delta | TrajectoryEvent | Discard | GroupEvent | Done
