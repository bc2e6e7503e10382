"""Fields of trajectories, candidates and token counts, shared by the answers of several routes."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, PlainSerializer, SerializationInfo, SkipValidation, WithJsonSchema

from darts_server.records import CandidateRecord
from darts_server.types import DiscardReason, FinishReason, Sample
from darts_server.types import SelectedAs as Selection
from darts_server.verify.types import NO_VERDICT, Verdict


def _dump_values(values: Sequence[Any], info: SerializationInfo) -> Sequence[Any]:
    # pydantic's own JSON needs a list. `encode_json` encodes arrays.
    return list(values) if info.mode_is_json() else values


# pydantic neither checks nor copies the arrays.
TokenIds = Annotated[
    Sequence[int],
    SkipValidation,
    PlainSerializer(_dump_values),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
Logprobs = Annotated[
    Sequence[float],
    SkipValidation,
    PlainSerializer(_dump_values),
    WithJsonSchema({"type": "array", "items": {"type": "number"}}),
]
TrajectoryId = Annotated[str, Field(description="The group's id, a colon, the candidate's index.")]
SelectedAs = Annotated[
    Selection | None,
    Field(
        description="End of the length order from which it was selected; null if it was not selected, or if it is "
        "unknown."
    ),
]
Reason = Annotated[DiscardReason | None, Field(description="Why it was discarded; null if it was not discarded.")]
Cut = Annotated[bool, Field(description="Whether it was cut at the group's token limit.")]
Quality = Annotated[
    float | None, Field(description="Probability of being correct, by its latest score; null without a score.")
]
Weight = Annotated[
    float | None,
    Field(
        description="1 / (its probability to be returned, given all candidates of the group). Null if it was not "
        "returned, or if some candidates can never be returned."
    ),
]
RewardByVerifier = Annotated[
    float | None, Field(description="Its reward by the verifier; null without one, or if it did not finish.")
]
CorrectByVerifier = Annotated[
    bool | None, Field(description="Whether the answer is right, as the verifier says; null without a reward.")
]
Advantage = Annotated[
    float | None,
    Field(
        description="Its reward minus the mean of the `num_rewarded` rewards, divided by their standard deviation if "
        "`advantage_std` is set. Null unless the group was selected by rewards."
    ),
]
Turns = Annotated[
    int | None, Field(description="Answered turns of a session; null for a candidate that is no session.")
]
ToolSeconds = Annotated[float | None, Field(description="Seconds between the turns of a session.")]
Sampling = Annotated[
    dict[str, Any],
    Field(description="The sampling parameters, by vLLM's names. Parameters that are null or empty are left out."),
]


class GroupFacts(BaseModel):
    """Facts of a group's record about how its trajectories were chosen."""

    num_eligible: int | None = Field(
        description="N: number of candidates that could be returned, without candidates that failed or ran before a "
        "restart."
    )
    num_shortest: int | None = Field(
        description="K, if the K shortest are returned and the other places are sampled from the rest; else null."
    )
    sampled_from: int | None = Field(
        description="S, if the trajectories are a sample of S candidates that were not pruned; else null."
    )
    earlier_pass_rate: float | None = Field(
        description="Weighted share of correct trajectories among the prompt's trajectories with rewards when the "
        "group started: a baseline that does not depend on the group. Null without rewards."
    )
    deadline: int | None = Field(
        description="Length in tokens at which the tail was cut, or would have been cut if the group had not explored "
        "its deadline. Null without a deadline."
    )
    run_probability: float | None = Field(
        description="Probability that the batch ran the prompt, below 1 only with `skip_floor`. The group's weight "
        "is its inverse. Null without a record."
    )
    mixed_versions: bool = Field(description="Whether the returned trajectories have several weight versions.")
    num_rewarded: int | None = Field(
        description="M', if the group was selected by rewards: number of candidates with a reward. The sum of weight * "
        "advantage * gradient over the trajectories, divided by M', estimates the gradient of all of them. Else null."
    )
    decided_early: bool = Field(
        description="Whether candidates were stopped because enough others had unequal rewards. Then no trajectory has "
        "a weight."
    )


class GeneratedOut(BaseModel):
    """The output of a candidate."""

    trajectory_id: TrajectoryId
    token_ids: TokenIds
    logprobs: Logprobs | None = Field(
        description="Log-probs of the tokens; null unless sampling.logprobs requests them."
    )
    text: str
    length: int
    weight_version_start: int | None
    weight_version_end: int | None
    version_spans: list[tuple[int, int]] = Field(
        description="Weight versions that sampled the tokens, in order, each with its number of tokens."
    )


class SampleOut(GeneratedOut):
    """A trajectory with its tokens."""

    finish_reason: FinishReason


class DiscardedOut(BaseModel):
    """A candidate that was not returned."""

    trajectory_id: TrajectoryId
    length: int
    reason: DiscardReason
    reward: RewardByVerifier = None
    correct: CorrectByVerifier = None


def list_discarded(
    group_id: str,
    candidates: Iterable[CandidateRecord],
    excluded: Container[int],
    verdicts: Mapping[int, Verdict] | None = None,
) -> list[DiscardedOut]:
    verdicts = verdicts or {}
    discarded = []
    for candidate in candidates:
        if candidate.reason is not None and candidate.index not in excluded:
            verdict = verdicts.get(candidate.index, NO_VERDICT)
            discarded.append(
                DiscardedOut(
                    trajectory_id=f"{group_id}:{candidate.index}",
                    length=candidate.tokens,
                    reason=candidate.reason,
                    reward=verdict.reward,
                    correct=verdict.correct,
                )
            )
    return discarded


class UsageOut(BaseModel):
    """Numbers of tokens, and the duration in seconds."""

    generated: int
    returned: int
    wasted: int
    seconds: float

    @classmethod
    def of(cls, generated: int, returned: int, seconds: float) -> Self:
        return cls(
            generated=generated,
            returned=returned,
            wasted=max(0, generated - returned),
            seconds=seconds,
        )


def copy_shared_fields(model: type[BaseModel], record: object) -> dict[str, Any]:
    """Return the fields of ``model`` that a record has under the same names."""
    return {name: getattr(record, name) for name in model.model_fields if hasattr(record, name)}


def make_trajectory_fields(
    model: type[BaseModel],
    trajectory_id: str,
    sample: Sample,
    candidate: CandidateRecord,
) -> dict[str, Any]:
    return copy_shared_fields(model, candidate) | {
        "trajectory_id": trajectory_id,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "text": sample.text,
        "length": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "version_spans": list(candidate.version_spans),
    }
