"""Votes: arguments in, the body of `/darts/v1/vote` out; its answer in, models out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import httpx
from pydantic import FiniteFloat

from ._errors import ProtocolError
from ._models import Discarded, FinishReason, Usage
from ._rollouts_request import Chat, given, prompt_body
from ._wire import Wire, parsed

Weights = Literal["majority", "rank", "log_odds"]
Score = Literal["head", "logprob", "lowest_logprob"]


class Voter(Wire):
    """A trajectory that came to its end. Without an `answer` it has no vote.

    `score`: by which its vote was weighed, None if that is not known. `weight`: of its vote. `logprobs` are of
    `token_ids`, None if none were asked for.
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


class Vote(Wire):
    """What came out of a vote.

    `answer`: the heaviest, None if no trajectory has one. `weights`: of each answer, the heaviest first; `votes`: how
    many trajectories have it. `decided_early`: candidates were stopped because they could change nothing.
    `calibration`: of log-odds by log-probs, "ready" or why all votes weigh the same. `id` is that of its group.
    """

    id: str
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
    """The body of a request; a list of patterns is the answers there may be."""
    form = prompt_body(prompt)
    plain = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": logprobs or None}
    options = {"weights": weights, "score": score, "key": key}
    return {
        "messages" if "messages" in form else "prompt": next(iter(form.values())),
        "n": n,
        "pattern": pattern if isinstance(pattern, str) else {"choices": list(pattern)},
        "sampling": given(plain) | sampling,
        **given(options),
    }


def parse_vote(body: dict[str, Any], answer: httpx.Response) -> Vote:
    """The vote; ProtocolError unless its tally is that of its trajectories, and these are whole."""
    vote = parsed(Vote, answer.content, answer.url.path)
    for voter in vote.trajectories:
        if voter.length != len(voter.token_ids):
            raise ProtocolError(f"{voter.trajectory_id} has {len(voter.token_ids)} tokens but says {voter.length}")
        if body["sampling"].get("logprobs") and len(voter.logprobs or ()) != voter.length:
            raise ProtocolError(f"{voter.trajectory_id} has not one logprob for each token")
    given_answers = Counter(voter.answer for voter in vote.trajectories if voter.answer is not None)
    if given_answers != vote.votes or set(vote.weights) != set(vote.votes):
        raise ProtocolError(f"vote {vote.id} says {vote.votes}, but its trajectories {dict(given_answers)}")
    heaviest = max(vote.weights.values(), default=None)
    if heaviest != (None if vote.answer is None else vote.weights.get(vote.answer)):
        raise ProtocolError(f"vote {vote.id} went to {vote.answer!r}, which is not the heaviest of {vote.weights}")
    return vote
