"""Groups of trajectories, and the events of a stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError, ValidationInfo, WrapValidator

from ._errors import ProtocolError, StatusError

FinishReason = Literal["stop", "length"]


class WireModel(BaseModel):
    """Part of an answer. Fields that only a later server knows are ignored; a wrong type is an error."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(
    model: type[ModelT],
    content: str | bytes,
    source: str,
    token_rows: Any = None,
) -> ModelT:
    """Parse JSON. Raise ProtocolError, with `source` and the field in its message, if it does not fit the model.

    `token_rows`: `TokenRows` of an answer that has row numbers in place of lists of tokens and log-probs.
    """
    try:
        return model.model_validate_json(content, context=token_rows)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        field_path = ".".join(str(part) for part in first["loc"]) or "body"
        raise ProtocolError(f"{source}: {field_path}: {first['msg']}") from exc


def parse_response(model: type[ModelT], response: httpx.Response) -> ModelT:
    return parse(model, response.content, response.url.path)


def _list_or_row(row_method: str) -> WrapValidator:
    """Validate a list, or read a row by a method of `TokenRows`."""

    def read(value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
        token_rows = info.context
        # Then the value is a row number.
        if token_rows is not None:
            return getattr(token_rows, row_method)(value)
        # A strict validator does not accept the parsed list as a tuple.
        if isinstance(value, list):
            value = tuple(value)
        return validate(value)

    return WrapValidator(read)


TokenIds = Annotated[tuple[int, ...], _list_or_row("token_ids")]
Logprobs = Annotated[tuple[FiniteFloat, ...], _list_or_row("logprobs")]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of a prompt. `completions` sets only the first five fields."""

    index: int
    """Index within the group, from 0."""
    text: str
    token_ids: tuple[int, ...]
    """Generated tokens, without the prompt."""
    logprobs: tuple[float, ...] | None
    """Natural log-probability of each token, or None if log-probs were not requested."""
    finish_reason: FinishReason
    trajectory_id: str | None = None
    """Name for its reward."""
    rank: int | None = None
    """Place in the group by length. 0 is the shortest."""
    selected_as: str | None = None
    """Rule that selected it: `short`, `long`, `long_truncated`, `fill`, `survivor` of pruning, or `reward`."""
    cut: bool = False
    """Whether it was cut at the group's `deadline`."""
    quality: float | None = None
    """Predicted probability of a correct answer, or None without a score."""
    weight: float | None = None
    """1 / (probability of its return), or None if some candidates of the group can never be returned."""
    reward: float | None = None
    """Reward by the server's verifier, or None without a reward."""
    correct: bool | None = None
    """Whether the answer is right, as the verifier says."""
    advantage: float | None = None
    """Reward minus the mean reward of the group's candidates, or None unless its policy selects by rewards."""
    weight_version_start: int | None = None
    """Version of the weights at the first token."""
    weight_version_end: int | None = None
    version_spans: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) for each run of tokens that the same weights sampled, in order."""

    @property
    def length(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


class AbortedTrajectory(WireModel):
    """A trajectory of an aborted group. `finish_reason` is "abort" unless it had finished before."""

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
    """A candidate that was not returned. `length` is the number of tokens that it had generated."""

    trajectory_id: str
    length: int
    reason: str
    reward: float | None = None
    correct: bool | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt by index: exactly `group_size`, or all survivors of pruning.

    `completions` sets only the first four fields.
    """

    group_id: str | None
    """Server's name for the group. The groups of one `completions` request share it."""
    prompt_token_ids: tuple[int, ...] | None
    """Tokens of the prompt, or None. `rollouts` has them only for prompts that you sent as token ids."""
    trajectories: tuple[Trajectory, ...]
    number: int = 0
    """Index of the prompt in the request."""
    prompt_key: str | None = None
    """Name under which the server keeps the prompt's statistics."""
    metadata: Mapping[str, Any] | None = field(default=None, hash=False)
    """Metadata of the prompt's `PromptSpec`."""
    candidates: int | None = None
    """Number of started candidates."""
    num_eligible: int | None = None
    """N: number of candidates that the weights stand for, without candidates that failed or ran before a restart."""
    num_shortest: int | None = None
    """K: number of places for the shortest, if the other places were sampled from the rest, or None."""
    sampled_from: int | None = None
    """S: number of unpruned candidates of which the trajectories are a sample, or None."""
    earlier_pass_rate: float | None = None
    """Share of correct trajectories among the prompt's earlier rewarded trajectories, or None."""
    deadline: int | None = None
    """Length in tokens at which the tail was cut, or None."""
    mixed_versions: bool = False
    """Whether several versions of the weights sampled the tokens."""
    num_rewarded: int | None = None
    """M': number of candidates with a reward, if the policy selects by rewards, or None."""
    zero_variance: bool | None = None
    """Whether the verifier's rewards are all equal, or None without rewards."""
    decided_early: bool = False
    """Whether candidates were stopped because enough others had unequal rewards."""
    run_probability: float | None = None
    """Probability that the server ran the prompt, or None. The group's weight is its inverse."""
    discarded: tuple[Discarded, ...] = ()
    seconds: float | None = None
    error: StatusError | None = None
    """Reason why the group failed. A failed group has no trajectories."""
    aborted: tuple[AbortedTrajectory, ...] = ()
    """Candidates of a group that was aborted, or whose server stopped. None was selected."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of generated tokens of each trajectory."""
        return tuple(len(trajectory.token_ids) for trajectory in self.trajectories)


class Usage(WireModel):
    """Number of tokens of a batch, and its duration in seconds."""

    generated: int
    returned: int
    wasted: int
    seconds: float


class Unfinished(WireModel):
    """A prompt without a group, because others were complete first or because it was aborted."""

    number: int
    prompt_key: str | None
    metadata: dict[str, Any] | None
    carry: str = "drop"
    """`drop` if you have to submit the prompt again. Otherwise the server keeps it, see `carried` of `rollouts`."""
    error: dict[str, Any] | None = None
    """OpenAI's error object of an aborted prompt, or None."""
    aborted: tuple[AbortedTrajectory, ...] | None = None
    """Candidates, if the server stopped and could not keep their tokens. The prompt starts again."""
    skipped: bool = False
    """Whether the prompt did not run, because its rewards were almost surely equal."""


class Delta(WireModel):
    """New tokens of a candidate that may still be selected."""

    trajectory_id: str
    number: int
    """Index of the prompt."""
    start: int
    """Position of the first new token in the completion."""
    token_ids: TokenIds
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class TrajectoryEvent:
    """A candidate was selected. The event has all its tokens; if it was `cut`, its deltas may have more."""

    trajectory_id: str
    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason
    cut: bool
    reward: float | None = None
    """Reward by the server's verifier, or None if it is not known yet."""
    correct: bool | None = None


class Discard(WireModel):
    """A candidate was discarded. No event of the candidate follows."""

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
    shortfall: int = 0
    """Number of groups that are missing to `num_groups`."""
    uninformative: tuple[int, ...] = ()
    """Numbers of the prompts whose groups did not count under `only`."""


Event = Delta | TrajectoryEvent | Discard | GroupEvent | Done
