"""Wire models of ``POST /darts/v1/rollouts``."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationInfo, field_validator, model_validator

from darts_server.exceptions import DartsError
from darts_server.http.errors import body_of
from darts_server.http.shaping.options import NAME_CHARS
from darts_server.rollout.batches.submission import GroupResult, Unfinished
from darts_server.types import CandidateRecord, DiscardReason, FinishReason, SelectedAs

LARGEST_BATCH = 100_000


class PromptIn(BaseModel):
    """A prompt: exactly one of token ids, messages and text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = Field(None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="A chat, in OpenAI's form.")
    text: str | None = Field(None, min_length=1)
    key: str | None = Field(
        None, min_length=1, max_length=NAME_CHARS, description="Under which its lengths are remembered."
    )
    metadata: dict[str, Any] | None = Field(None, description="Comes back with the group, unread.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("token_ids", "messages", "text") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of token_ids, messages and text, got {given or 'none'}")
        return self


class RolloutsIn(BaseModel):
    """A batch of prompts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompts: list[PromptIn] = Field(min_length=1, max_length=LARGEST_BATCH)
    group_size: int = Field(ge=1, description="Trajectories that are returned for each prompt.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    policy: dict[str, Any] = Field(
        {}, description="`name`: which policy; further keys: settings of the server to change for this batch."
    )
    budget: int | None = Field(None, ge=1, description="Candidates of the whole batch; None leaves it to the policy.")
    num_groups: int | None = Field(
        None, ge=1, description="Groups that are enough: the first to be decided; the others are stopped. None for all."
    )
    survivors: bool = Field(
        False, description="Under a policy that prunes: return all that were not pruned, `group_size` at least."
    )
    stream: Literal[False, "groups", "tokens"] = Field(
        False, description='Server-sent events: "groups" as they are decided, or their "tokens" as they are generated.'
    )
    chunk_tokens: int = Field(
        100, ge=1, description='Tokens of a candidate that are sent together, at least. Only with "stream": "tokens".'
    )

    @field_validator("chunk_tokens")
    @classmethod
    def _of_tokens(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("stream") != "tokens":
            raise ValueError('is for "stream": "tokens" alone; leave it out')
        return value


class TrajectoryOut(BaseModel):
    """A returned trajectory."""

    trajectory_id: str
    token_ids: list[int]
    logprobs: list[float] | None = Field(description="Of these tokens; None unless sampling.logprobs asked for them.")
    text: str
    finish_reason: FinishReason
    length: int
    rank: int = Field(description="Place in the group by length, 0 for the shortest.")
    selected_as: SelectedAs | None = Field(
        description="From which end of the length order it was selected; None if that is not known."
    )
    cut: bool
    quality: float | None = Field(description="Its chance to end correct by its latest score; None if it has none.")
    weight_version_start: int | None
    weight_version_end: int | None


class DiscardedOut(BaseModel):
    """A candidate that was not returned."""

    trajectory_id: str
    length: int
    reason: DiscardReason


class GroupOut(BaseModel):
    """One prompt's group, or the error that ended it."""

    number: int = Field(description="Of its prompt in the request, from 0.")
    group_id: str
    prompt_key: str
    metadata: dict[str, Any] | None
    candidates: int
    deadline: int | None
    mixed_versions: bool
    mask: list[bool] = Field(description="For each candidate that was started, by index, whether it is returned.")
    trajectories: list[TrajectoryOut]
    discarded: list[DiscardedOut]
    seconds: float | None
    error: dict[str, Any] | None

    @classmethod
    def of(cls, result: GroupResult) -> Self:
        record = result.record
        known = {c.index: c for c in record.candidates} if record is not None else {}
        order = sorted(result.samples, key=lambda i: (len(result.samples[i].token_ids), i))
        return cls(
            number=result.number,
            group_id=result.group_id,
            prompt_key=result.prompt_key,
            metadata=None if result.metadata is None else dict(result.metadata),
            candidates=len(known),
            deadline=None if record is None else record.deadline,
            mixed_versions=record is not None and record.mixed_versions,
            mask=[index in result.samples for index in sorted(known)],
            trajectories=[_trajectory(result, i, order.index(i), known.get(i)) for i in sorted(result.samples)],
            discarded=[
                DiscardedOut(trajectory_id=f"{result.group_id}:{c.index}", length=c.tokens, reason=c.reason)
                for c in known.values()
                if c.reason is not None
            ],
            seconds=None if record is None else record.ended_at - record.started_at,
            error=None if result.error is None else error_object(result.error),
        )


class UsageOut(BaseModel):
    """Tokens of the batch, and how long it took."""

    generated: int
    returned: int
    wasted: int
    seconds: float

    @classmethod
    def of(cls, groups: Sequence[GroupResult], seconds: float) -> Self:
        generated = sum(g.record.generated_tokens for g in groups if g.record is not None)
        returned = sum(len(sample.token_ids) for g in groups for sample in g.samples.values())
        return cls(generated=generated, returned=returned, wasted=max(0, generated - returned), seconds=seconds)


class UnfinishedOut(BaseModel):
    """A prompt whose group was stopped because enough others were decided."""

    number: int
    prompt_key: str
    metadata: dict[str, Any] | None

    @classmethod
    def of(cls, unfinished: Unfinished) -> Self:
        metadata = None if unfinished.metadata is None else dict(unfinished.metadata)
        return cls(number=unfinished.number, prompt_key=unfinished.prompt_key, metadata=metadata)


class RolloutsOut(BaseModel):
    """The groups in the order of the prompts."""

    id: str
    policy: str
    groups: list[GroupOut]
    unfinished: list[UnfinishedOut]
    usage: UsageOut


class CancelledOut(BaseModel):
    """``cancelled``: whether the batch was still running."""

    id: str
    cancelled: bool


def _trajectory(result: GroupResult, index: int, rank: int, candidate: CandidateRecord | None) -> TrajectoryOut:
    sample = result.samples[index]
    return TrajectoryOut(
        trajectory_id=f"{result.group_id}:{index}",
        token_ids=list(sample.token_ids),
        logprobs=None if sample.logprobs is None else list(sample.logprobs),
        text=sample.text,
        finish_reason=sample.finish_reason,
        length=len(sample.token_ids),
        rank=rank,
        selected_as=None if candidate is None else candidate.selected_as,
        cut=candidate is not None and candidate.cut,
        quality=None if candidate is None else candidate.quality,
        weight_version_start=None if candidate is None else candidate.weight_version_start,
        weight_version_end=None if candidate is None else candidate.weight_version_end,
    )


def error_object(error: Exception) -> dict[str, Any]:
    """OpenAI's error object."""
    known = error if isinstance(error, DartsError) else DartsError(f"{type(error).__name__}: {error}")
    inner = body_of(known)["error"]
    assert isinstance(inner, dict)
    return inner
