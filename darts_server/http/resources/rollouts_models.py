"""Request and response models of ``/darts/v1/rollouts``."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from darts_server.exceptions import DartsError
from darts_server.http.body import Body
from darts_server.http.errors import body_of
from darts_server.http.resources.trajectories import (
    Counted,
    Cut,
    DiscardedOut,
    NumShortest,
    Quality,
    SampledFrom,
    SampleOut,
    Sampling,
    SelectedAs,
    UsageOut,
    Weight,
    sample_fields,
)
from darts_server.identifiers import Name
from darts_server.rollout.batches.submission import GroupResult, Unfinished
from darts_server.types import CandidateRecord

MAX_PROMPTS = 100_000


def _encode_object(value: object) -> bytes:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


JsonObject = Annotated[
    bytes, BeforeValidator(_encode_object), WithJsonSchema({"type": "object", "additionalProperties": True})
]
"""An object, as JSON."""


class PromptIn(Body):
    """A prompt, as exactly one of token ids, messages and text."""

    token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = Field(None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="A chat, in OpenAI's form.")
    text: str | None = Field(None, min_length=1)
    key: Name | None = Field(None, description="Name under which its statistics are kept; its tokens by default.")
    metadata: JsonObject | None = Field(None, description="Returned with the group unchanged.")

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        given = [name for name in ("token_ids", "messages", "text") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of token_ids, messages and text, got {given or 'none'}")
        return self


class RolloutsIn(Body):
    """A batch of prompts."""

    prompts: list[PromptIn] = Field(min_length=1, max_length=MAX_PROMPTS)
    group_size: int = Field(ge=1, description="Trajectories returned per prompt.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    policy: dict[str, Any] = Field(
        {}, description="`name`: the policy; other keys: runtime settings to override for this batch."
    )
    budget: int | None = Field(None, ge=1, description="Candidates of the whole batch; by default the policy decides.")
    num_groups: int | None = Field(
        None,
        ge=1,
        description="Number of groups that are enough: the others are stopped when it is reached. Default: all.",
    )
    survivors: bool | None = Field(
        None,
        description="Under a policy that prunes: return all trajectories not pruned, more or fewer than `group_size`. "
        "Default: true for `arrol` and `roulette`.",
    )
    stream: Literal[False, "groups", "tokens"] = Field(
        False, description='Stream server-sent events: "groups" as they are decided, or "tokens" as they are generated.'
    )
    chunk_tokens: int = Field(
        100, ge=1, description='Minimum tokens of a candidate per event. Only with "stream": "tokens".'
    )

    @field_validator("chunk_tokens")
    @classmethod
    def _check_chunk_tokens(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("stream") != "tokens":
            raise ValueError('is only valid with "stream": "tokens"; omit it')
        return value


class TrajectoryOut(SampleOut):
    """A returned trajectory."""

    rank: int = Field(description="Place in the group by length, 0 for the shortest.")
    selected_as: SelectedAs
    cut: Cut
    quality: Quality
    weight: Weight


class GroupOut(BaseModel):
    """The group of one prompt, or its error."""

    number: int = Field(description="Index of its prompt in the request.")
    group_id: str
    prompt_key: str
    metadata: dict[str, Any] | None
    candidates: int
    counted: Counted | None
    num_shortest: NumShortest
    sampled_from: SampledFrom
    deadline: int | None
    mixed_versions: bool
    mask: list[bool] = Field(description="For each started candidate, by index, whether it was returned.")
    trajectories: list[TrajectoryOut]
    discarded: list[DiscardedOut]
    seconds: float | None
    error: dict[str, Any] | None

    @classmethod
    def of(cls, result: GroupResult) -> Self:
        record = result.record
        candidates = {c.index: c for c in record.candidates} if record is not None else {}
        order = sorted(result.samples, key=lambda i: (len(result.samples[i].token_ids), i))
        return cls(
            number=result.number,
            group_id=result.group_id,
            prompt_key=result.prompt_key,
            metadata=None if result.metadata is None else json.loads(result.metadata),
            candidates=len(candidates),
            counted=(len(result.samples) or None) if record is None else record.counted,
            num_shortest=None if record is None else record.num_shortest,
            sampled_from=None if record is None else record.sampled_from,
            deadline=None if record is None else record.deadline,
            mixed_versions=record is not None and record.mixed_versions,
            mask=[index in result.samples for index in sorted(candidates)],
            trajectories=[_trajectory(result, i, order.index(i), candidates.get(i)) for i in sorted(result.samples)],
            discarded=[
                DiscardedOut(trajectory_id=f"{result.group_id}:{c.index}", length=c.tokens, reason=c.reason)
                for c in candidates.values()
                if c.reason is not None
            ],
            seconds=None if record is None else record.ended_at - record.started_at,
            error=None if result.error is None else error_object(result.error),
        )


def usage_of(groups: Sequence[GroupResult], seconds: float) -> UsageOut:
    """Sum up the tokens of a batch."""
    generated = sum(g.record.generated_tokens for g in groups if g.record is not None)
    returned = sum(len(sample.token_ids) for g in groups for sample in g.samples.values())
    return UsageOut.of(generated, returned, seconds)


class UnfinishedOut(BaseModel):
    """A prompt whose group was stopped because enough others were decided."""

    number: int
    prompt_key: str
    metadata: dict[str, Any] | None

    @classmethod
    def of(cls, unfinished: Unfinished) -> Self:
        metadata = None if unfinished.metadata is None else json.loads(unfinished.metadata)
        return cls(number=unfinished.number, prompt_key=unfinished.prompt_key, metadata=metadata)


class RolloutsOut(BaseModel):
    """The groups, in the order of the prompts."""

    id: str
    policy: str
    groups: list[GroupOut]
    survivors: bool = Field(description="Whether groups have all trajectories not pruned, in place of `group_size`.")
    sampling: Sampling
    unfinished: list[UnfinishedOut]
    usage: UsageOut


class CancelledOut(BaseModel):
    """``cancelled``: whether the batch was still running."""

    id: str
    cancelled: bool


def _trajectory(result: GroupResult, index: int, rank: int, candidate: CandidateRecord | None) -> TrajectoryOut:
    return TrajectoryOut(
        **sample_fields(f"{result.group_id}:{index}", result.samples[index], candidate),
        rank=rank,
        selected_as=None if candidate is None else candidate.selected_as,
        cut=candidate is not None and candidate.cut,
        quality=None if candidate is None else candidate.quality,
        weight=1.0 if candidate is None else candidate.weight,  # only a shadow's group comes before its record
    )


def error_object(error: Exception) -> dict[str, Any]:
    """Return OpenAI's error object."""
    error_of_ours = error if isinstance(error, DartsError) else DartsError(f"{type(error).__name__}: {error}")
    inner = body_of(error_of_ours)["error"]
    assert isinstance(inner, dict)
    return inner
