"""``POST /darts/v1/vote``: answer a question by a vote of several trajectories."""

import json
from functools import partial
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Request
from msgspec import Raw
from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator
from starlette.responses import Response

from darts_server.http.answers import JSON, encode_json, respond, run_in_encoder_thread
from darts_server.http.body import Body, parse_body, read_body, while_connected
from darts_server.http.openapi import json_body
from darts_server.http.resources.rollouts_models import ChatOptionsIn, Messages, TokenIds
from darts_server.http.resources.trajectories import (
    DiscardedOut,
    SampleOut,
    Sampling,
    UsageOut,
    list_discarded,
    make_trajectory_fields,
)
from darts_server.identifiers import Name
from darts_server.rollout.voting import Score, VoteRequest, VoteResult, VoteRunner
from darts_server.types import PromptSpec, VoteWeights

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Enough for a prompt of a million tokens."""
EXAMPLES = (
    {"prompt": "7a-5b*4>", "n": 8, "sampling": {"max_tokens": 200}, "pattern": "#([0-9])"},
    {
        "messages": [{"role": "user", "content": "Is 7 a prime number?"}],
        "n": 8,
        "pattern": {"choices": ["yes", "no"]},
        "weights": "rank",
        "score": "logprob",
    },
)


class ChoicesIn(Body):
    """The possible answers. The answer of a text is the choice that occurs last in it."""

    choices: list[str] = Field(min_length=1, fail_fast=True)


def _create_discriminator(*kinds: type, name: str) -> Discriminator:
    """Return the discriminator of a union of strings and ``kinds``, which errors call ``name``."""

    def tag_of(value: object) -> str | None:
        if isinstance(value, str):
            return "text"
        if isinstance(value, kinds):
            # An empty tag does not appear in the place of an error.
            return ""
        # pydantic refuses a value without a tag.
        return None

    return Discriminator(
        tag_of,
        custom_error_type="type",
        custom_error_message=f"must be a string, or {name}",
    )


Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("")],
    _create_discriminator(list, name="an array of integers"),
]
PatternIn = Annotated[
    Annotated[str, Tag("text")] | Annotated[ChoicesIn, Tag("")],
    _create_discriminator(dict, ChoicesIn, name="an object"),
]


class VoteIn(ChatOptionsIn):
    """A question, as either prompt or messages, and how answers are found and weighted."""

    prompt: Prompt | None = Field(None, description="Text or token ids.")
    messages: Messages | None = Field(None, description="A chat, in OpenAI's form.")
    key: Name | None = Field(None, description="Name of the prompt in statistics. By default its tokens are the name.")
    n: int = Field(ge=1, description="Number of trajectories that may vote.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    pattern: PatternIn = Field(
        description='How the answer is found: a regular expression with one group, "boxed" for LaTeX\'s \\boxed{}, '
        "or the possible answers."
    )
    weights: VoteWeights = Field("majority", description="How votes are weighted.")
    score: Score | None = Field(
        None, description='What weights are computed from: the quality head, or log-probs. Not used by "majority".'
    )

    @field_validator("prompt", mode="after")
    @classmethod
    def _refuse_empty(cls, value: str | list[int] | None) -> str | list[int] | None:
        if value is not None and not value:
            raise ValueError("must not be empty")
        return value

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        self.check_prompt_form("prompt", "messages")
        return self

    def to_vote_request(self) -> VoteRequest:
        text = self.prompt if isinstance(self.prompt, str) else None
        token_ids = self.prompt if isinstance(self.prompt, list) else None
        chat_options = self.chat_options()
        encoded_options = msgspec.json.encode(chat_options) if chat_options else None
        return VoteRequest(
            prompt=PromptSpec(
                token_ids,
                self.messages,
                text,
                self.key,
                chat_options=encoded_options,
            ),
            n=self.n,
            pattern=self.pattern if isinstance(self.pattern, str) else self.pattern.choices,
            weights=self.weights,
            score=self.score,
            sampling=self.sampling,
        )


class VoterOut(SampleOut):
    """A finished trajectory of a vote."""

    answer: str | None = Field(description="Null if the text has no answer. Then the trajectory has no vote.")
    score: float | None = Field(description="Score from which its weight was computed; null if unknown.")
    weight: float | None = Field(description="Weight of its vote.")


class VoteOut(BaseModel):
    """The result of a vote."""

    id: str = Field(description="Id of its group, for GET /darts/v1/groups.")
    sampling: Sampling
    answer: str | None = Field(description="The answer with the largest weight; null if no trajectory has an answer.")
    weights: dict[str, float] = Field(description="Sum of the weights of each answer's votes, largest first.")
    votes: dict[str, int] = Field(description="Number of trajectories with each answer.")
    decided_early: bool = Field(description="Whether candidates were stopped because they could not change the answer.")
    calibration: str | None = Field(
        description="For log-odds by log-probs: 'ready', or why all votes have the same weight. Otherwise null."
    )
    trajectories: list[VoterOut]
    discarded: list[DiscardedOut]
    usage: UsageOut

    @classmethod
    def of(cls, result: VoteResult) -> Self:
        tally = result.tally
        ballots = {ballot.index: ballot for ballot in result.ballots}
        candidates = {candidate.index: candidate for candidate in result.record.candidates}
        returned_tokens = sum(len(ballot.sample.token_ids) for ballot in result.ballots)

        trajectories = []
        for index, ballot in ballots.items():
            fields = make_trajectory_fields(VoterOut, f"{result.vote_id}:{index}", ballot.sample, candidates[index])
            fields["answer"] = ballot.answer
            fields["score"] = ballot.score
            fields["weight"] = tally.vote_weights.get(index)
            # Scores may have needed log-probs that the caller has not requested.
            if not result.request.wants_logprobs:
                fields["logprobs"] = None
            trajectories.append(VoterOut(**fields))

        return cls(
            id=result.vote_id,
            sampling=dict(result.sampling),
            answer=tally.winner,
            weights=dict(tally.weights),
            votes=dict(tally.votes),
            decided_early=result.decided_early,
            calibration=result.calibration,
            trajectories=trajectories,
            discarded=list_discarded(result.vote_id, candidates.values(), ballots),
            usage=UsageOut.of(result.record.generated_tokens, returned_tokens, result.seconds),
        )


def encode_vote(result: VoteResult) -> bytes:
    fields = VoteOut.of(result).model_dump()
    # The caller's sampling parameters may have numbers with more digits than msgspec encodes.
    fields["sampling"] = Raw(json.dumps(fields["sampling"], separators=(",", ":")).encode())
    return encode_json(fields)


def add_routes(api: APIRouter, votes: VoteRunner[Any, Any]) -> None:
    @api.post("/vote", response_model=VoteOut, openapi_extra=json_body(VoteIn, *EXAMPLES))
    async def vote(request: Request) -> Response:
        """Sample one prompt until the result of the vote is certain; stop the remaining candidates."""
        body = await parse_body(VoteIn, await read_body(request, MAX_BODY_BYTES))
        result = await while_connected(request, votes.run(body.to_vote_request()))
        # Many trajectories take long to encode.
        answer = await while_connected(request, run_in_encoder_thread(partial(encode_vote, result)))
        return respond(answer, JSON)
