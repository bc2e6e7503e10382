"""`/darts/v1/vote`: its answers are checked."""

from collections import Counter
from typing import Any, Literal

from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import Discarded, FinishReason, Usage, WireModel

Weights = Literal["majority", "rank", "log_odds"]
Score = Literal["head", "logprob", "lowest_logprob"]


class Voter(WireModel):
    """A finished trajectory. Without an `answer` it has no vote.

    `score`: the score that its vote is weighted by, None if there is none. `weight`: of its vote. `logprobs` are those
    of `token_ids`, None if they were not requested.
    """

    trajectory_id: str
    answer: str | None
    score: FiniteFloat | None
    weight: FiniteFloat | None
    token_ids: tuple[int, ...]
    logprobs: tuple[FiniteFloat, ...] | None
    text: str
    finish_reason: FinishReason
    length: int
    weight_version_start: int | None
    weight_version_end: int | None


class Vote(WireModel):
    """The result of a vote.

    `answer`: the one with the largest weight, None if no trajectory has one. `weights`: of each answer, the largest
    first; `votes`: the number of trajectories with that answer. `decided_early`: candidates were stopped because they
    could not change the result. `calibration`: of log-odds from log-probs, "ready" or why all votes have equal weight.
    `id` is the id of its group. `sampling`: the sampling parameters in force.
    """

    id: str
    sampling: dict[str, Any] | None = None
    answer: str | None
    weights: dict[str, FiniteFloat]
    votes: dict[str, int]
    decided_early: bool
    calibration: str | None
    trajectories: tuple[Voter, ...]
    discarded: tuple[Discarded, ...]
    usage: Usage


def check_vote(body: dict[str, Any], vote: Vote) -> Vote:
    """Return the vote; raise ProtocolError unless its trajectories are complete and add up to its tally."""
    for voter in vote.trajectories:
        if voter.length != len(voter.token_ids):
            raise ProtocolError(
                f"{voter.trajectory_id} has {len(voter.token_ids)} tokens, but its length is {voter.length}"
            )
        if body["sampling"].get("logprobs") and len(voter.logprobs or ()) != voter.length:
            raise ProtocolError(f"{voter.trajectory_id} does not have one logprob for each token")
    counted = Counter(voter.answer for voter in vote.trajectories if voter.answer is not None)
    if counted != vote.votes or set(vote.weights) != set(vote.votes):
        raise ProtocolError(f"vote {vote.id} has the tally {vote.votes}, but its trajectories {dict(counted)}")
    largest = max(vote.weights.values(), default=None)
    if largest != (None if vote.answer is None else vote.weights.get(vote.answer)):
        raise ProtocolError(f"the answer of vote {vote.id}, {vote.answer!r}, has not the largest of {vote.weights}")
    return vote
