"""`/darts/v1/vote`: the result, and its checks."""

from collections import Counter
from typing import Any, Literal

from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import Discarded, FinishReason, Usage, WireModel

Weights = Literal["majority", "rank", "log_odds"]
Score = Literal["head", "logprob", "lowest_logprob"]


class Voter(WireModel):
    """A finished trajectory. It has a vote if it has an answer."""

    trajectory_id: str
    answer: str | None
    score: FiniteFloat | None
    """Score from which the weight is computed, or None."""
    weight: FiniteFloat | None
    """Weight of the vote."""
    token_ids: tuple[int, ...]
    logprobs: tuple[FiniteFloat, ...] | None
    """Log-prob of each token in `token_ids`, or None if log-probs were not requested."""
    text: str
    finish_reason: FinishReason
    length: int
    weight_version_start: int | None
    weight_version_end: int | None


class Vote(WireModel):
    """The result of a vote."""

    id: str
    """Id of the vote's group."""
    sampling: dict[str, Any] | None = None
    """Sampling parameters in force."""
    answer: str | None
    """Answer with the largest weight, or None if no trajectory has an answer."""
    weights: dict[str, FiniteFloat]
    """Weight of each answer, largest first."""
    votes: dict[str, int]
    """Number of trajectories with each answer."""
    decided_early: bool
    """Whether candidates were stopped because they could not change the result."""
    calibration: str | None
    """State of log-odds from log-probs: `ready`, or the reason why all votes have equal weight."""
    trajectories: tuple[Voter, ...]
    discarded: tuple[Discarded, ...]
    usage: Usage


def check_vote(body: dict[str, Any], vote: Vote) -> Vote:
    """Return the vote. Raise ProtocolError unless its trajectories are complete and add up to its tally."""
    for voter in vote.trajectories:
        name = voter.trajectory_id
        if voter.length != len(voter.token_ids):
            raise ProtocolError(f"{name} has {len(voter.token_ids)} tokens, but its length is {voter.length}")
        if body["sampling"].get("logprobs") and len(voter.logprobs or ()) != voter.length:
            raise ProtocolError(f"{name} does not have one logprob for each token")

    tally = Counter(voter.answer for voter in vote.trajectories if voter.answer is not None)
    if tally != vote.votes or set(vote.weights) != set(vote.votes):
        raise ProtocolError(f"vote {vote.id} has the tally {vote.votes}, but its trajectories {dict(tally)}")

    largest_weight = max(vote.weights.values(), default=None)
    answer_weight = None if vote.answer is None else vote.weights.get(vote.answer)
    if answer_weight != largest_weight:
        raise ProtocolError(f"the answer of vote {vote.id}, {vote.answer!r}, has not the largest of {vote.weights}")
    return vote
