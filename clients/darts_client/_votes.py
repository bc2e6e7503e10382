"""`/darts/v1/vote`: requests are built, and answers are checked."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import Discarded, FinishReason, Usage, WireModel
from ._prompts import Chat, drop_none, prompt_body

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


def vote_body(
    prompt: str | Sequence[int] | Chat,
    *,
    n: int,
    pattern: str | Sequence[str],
    max_tokens: int,
    weights: Weights,
    score: Score | None,
    temperature: float,
    seed: int | None,
    logprobs: bool,
    key: str | None,
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """Build the body of a request; a list of patterns is the list of possible answers."""
    prompt_json = prompt_body(prompt)
    own_sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": logprobs or None}
    options = {"weights": weights, "score": score, "key": key}
    return {
        "messages" if "messages" in prompt_json else "prompt": next(iter(prompt_json.values())),
        "n": n,
        "pattern": pattern if isinstance(pattern, str) else {"choices": list(pattern)},
        "sampling": drop_none(own_sampling) | sampling,
        **drop_none(options),
    }


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
