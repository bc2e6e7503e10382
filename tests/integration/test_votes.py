"""The vote route on real vLLM."""

import httpx
import pytest

from darts_client import Client
from darts_client._votes import Score, Weights
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS
from darts_server.offline.demo.server import Server
from tests.integration.waiting import wait_idle

pytestmark = pytest.mark.engine
EASY = "7a-5b*4>"
ANSWER = "#([0-9])$"


def test_a_vote_stops_candidates_that_cannot_change_it_and_nothing_runs_on(server: Server) -> None:
    with Client(server.url) as client:
        votes = [
            client.vote(EASY, n=16, max_tokens=MAX_RESPONSE_TOKENS, pattern=ANSWER, seed=seed) for seed in range(4)
        ]
        wait_idle(server)  # a vote is answered before the candidates that it stopped have ended
        [group] = client.groups.get(votes[0].id)
    assert [vote.answer for vote in votes] == ["8"] * 4
    assert any(vote.decided_early for vote in votes)
    for vote in votes:
        assert len(vote.trajectories) + len(vote.discarded) == 16
        assert sum(vote.votes.values()) <= len(vote.trajectories)
        assert vote.decided_early == any(d.reason == "decided" for d in vote.discarded)
    assert (group.policy, group.group_size) == ("vote", 16)


def test_the_trajectories_of_a_vote_are_those_of_an_unshaped_batch(server: Server) -> None:
    """An unshaped batch with the same seeds returns all trajectories that the vote may see."""
    whole = {
        "prompts": [{"text": EASY}],
        "group_size": 8,
        "sampling": {"max_tokens": 100, "seed": 11, "logprobs": True},
        "policy": {"name": "off"},
    }
    [group] = httpx.post(f"{server.url}/darts/v1/rollouts", json=whole, timeout=240).json()["groups"]
    texts = {t["trajectory_id"].rpartition(":")[2]: t["text"] for t in group["trajectories"]}
    with Client(server.url) as client:
        kinds: list[tuple[Weights, Score | None]]
        kinds = [("majority", None), ("rank", "logprob"), ("log_odds", "lowest_logprob")]
        for weights, score in kinds:
            vote = client.vote(EASY, n=8, max_tokens=100, pattern=ANSWER, weights=weights, score=score, seed=11)
            assert {v.trajectory_id.rpartition(":")[2]: v.text for v in vote.trajectories}.items() <= texts.items()
            assert all(v.logprobs is None and (v.score is None) == (score is None) for v in vote.trajectories)
