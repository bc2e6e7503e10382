"""Wire models of ``POST /darts/v1/vote``."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, Tag, field_validator, model_validator

from darts_server.http.resources.rollouts_models import DiscardedOut
from darts_server.http.shaping.options import NAME_CHARS
from darts_server.rollout.voting.ballots import Ballot
from darts_server.rollout.voting.runner import VoteRequest, VoteResult
from darts_server.types import CandidateRecord, FinishReason, PromptSpec

TokenIds = list[Annotated[StrictInt, Field(ge=0)]]


class ChoicesIn(BaseModel):
    """The answers there may be; the one that stands last in a text is its answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    choices: list[str] = Field(min_length=1)


def _text_or(kind: type) -> Discriminator:
    """A string or what is of that kind. The tag of the latter is empty, so that errors name no tag."""
    return Discriminator(
        lambda value: "text" if isinstance(value, str) else "" if isinstance(value, kind | ChoicesIn) else None,
        custom_error_type="type",
        custom_error_message="must be a string, or " + ("an array of integers" if kind is list else "an object"),
    )


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("")],
    _text_or(list),
]
PatternIn = Annotated[
    Annotated[str, Tag("text")] | Annotated[ChoicesIn, Tag("")],
    _text_or(dict),
]


class VoteIn(BaseModel):
    """A question: exactly one of prompt and messages, and how its answers are found and weighed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Prompt | None = Field(None, description="Text or token ids.")
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="A chat, in OpenAI's form.")
    key: str | None = Field(
        None, min_length=1, max_length=NAME_CHARS, description="Under which the prompt's lengths are remembered."
    )
    n: int = Field(ge=1, description="Trajectories that may vote.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    pattern: PatternIn = Field(
        description='Where the answer stands: a regular expression with one group, "boxed" for LaTeX\'s \\boxed{}, '
        "or the answers there may be."
    )
    weights: Literal["majority", "rank", "log_odds"] = Field("majority", description="What a vote weighs.")
    score: Literal["head", "logprob", "lowest_logprob"] | None = Field(
        None, description='By what votes are weighed: the quality head, or log-probs. "majority" needs none.'
    )

    @field_validator("prompt", mode="after")
    @classmethod
    def _something(cls, value: str | list[int] | None) -> str | list[int] | None:
        if value is not None and not value:
            raise ValueError("must not be empty")
        return value

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in ("prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt and messages, got {given or 'none'}")
        return self

    @property
    def asked(self) -> VoteRequest:
        text = self.prompt if isinstance(self.prompt, str) else None
        tokens = self.prompt if isinstance(self.prompt, list) else None
        return VoteRequest(
            prompt=PromptSpec(tokens, self.messages, text, self.key),
            n=self.n,
            pattern=self.pattern if isinstance(self.pattern, str) else self.pattern.choices,
            weights=self.weights,
            score=self.score,
            sampling=self.sampling,
        )


class VoterOut(BaseModel):
    """A trajectory that came to its end."""

    trajectory_id: str
    answer: str | None = Field(description="None if there is none in it; then it has no vote.")
    score: float | None = Field(description="By which its vote was weighed; None if that is not known.")
    weight: float | None = Field(description="Of its vote.")
    token_ids: list[int]
    logprobs: list[float] | None = Field(description="Of these tokens; None unless sampling.logprobs asked for them.")
    text: str
    finish_reason: FinishReason
    length: int
    weight_version_start: int | None
    weight_version_end: int | None


class VoteUsageOut(BaseModel):
    """Tokens of the vote, and how long it took."""

    generated: int
    returned: int
    wasted: int
    seconds: float


class VoteOut(BaseModel):
    """What came out of the vote."""

    id: str = Field(description="Of its group, for GET /darts/v1/groups.")
    answer: str | None = Field(description="The heaviest; None if no trajectory has an answer.")
    weights: dict[str, float] = Field(description="What the votes for each answer weigh together, heaviest first.")
    votes: dict[str, int] = Field(description="Trajectories with each answer.")
    decided_early: bool = Field(description="Whether candidates were stopped because they could change nothing.")
    calibration: str | None = Field(
        description="Of log-odds by log-probs: 'ready', or why all votes weigh the same. None for others."
    )
    trajectories: list[VoterOut]
    discarded: list[DiscardedOut]
    usage: VoteUsageOut

    @classmethod
    def of(cls, result: VoteResult) -> Self:
        tally, record = result.count.tally, result.record
        known = {candidate.index: candidate for candidate in record.candidates}
        taken = {ballot.index for ballot in result.ballots}
        returned = sum(len(ballot.sample.token_ids) for ballot in result.ballots)
        generated = record.generated_tokens
        return cls(
            id=result.vote_id,
            answer=tally.winner,
            weights=dict(tally.weights),
            votes=dict(tally.votes),
            decided_early=result.decided_early,
            calibration=result.calibration,
            trajectories=[_voter(result, ballot, known[ballot.index]) for ballot in result.ballots],
            discarded=[
                DiscardedOut(
                    trajectory_id=f"{result.vote_id}:{index}",
                    length=candidate.tokens,
                    reason=candidate.reason,
                )
                for index, candidate in known.items()
                if index not in taken and candidate.reason is not None
            ],
            usage=VoteUsageOut(
                generated=generated, returned=returned, wasted=max(0, generated - returned), seconds=result.seconds
            ),
        )


def _voter(result: VoteResult, ballot: Ballot, candidate: CandidateRecord) -> VoterOut:
    sample = ballot.sample
    wanted = result.question.wants_logprobs and sample.logprobs is not None
    return VoterOut(
        trajectory_id=f"{result.vote_id}:{ballot.index}",
        answer=ballot.answer,
        score=None if ballot.score is None else ballot.score.value,
        weight=result.count.weights.get(ballot.index),
        token_ids=list(sample.token_ids),
        logprobs=list(sample.logprobs or ()) if wanted else None,
        text=sample.text,
        finish_reason=sample.finish_reason,
        length=len(sample.token_ids),
        weight_version_start=candidate.weight_version_start,
        weight_version_end=candidate.weight_version_end,
    )
