"""Votes on the scripted engine."""

import asyncio
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.engine.scripted import Script, settle
from darts_server.estimates.answers import Extractor, create_extractor
from darts_server.estimates.calibration import CalibrationStatus, Label
from darts_server.exceptions import CandidateFailed, InvalidRequest
from darts_server.rollout.run import GroupRun
from darts_server.rollout.voting import (
    LOGPROB_KINDS,
    TEXT_CHARS,
    Ballot,
    BallotBox,
    Confidence,
    Score,
    VoteRequest,
    VoteResult,
    VoteRunner,
    find_answer,
)
from darts_server.store import Store
from darts_server.types import DiscardReason, FinishReason, Outcome, PromptSpec, Sample, VoteOutcome, VoteWeights
from tests.rollout.helpers import AtOnce, Documents, Harness, Texts
from tests.rollout.pruning.fake_scorer import FakeScorer

pytestmark = pytest.mark.anyio
LABELS = 300
SURVIVAL = 0.1
"""Of every candidate, whose quality is set by the test."""


@dataclass(frozen=True)
class Voter:
    """A candidate that finishes after ``length`` tokens. ``logprob``: of each of them."""

    length: int
    answer: str | None = None
    logprob: float = -1.0
    script: Script | None = None


class Election(Texts):
    """Runs votes in which candidate i is the i-th voter. The renderer recognises voters by their different lengths."""

    def __init__(self, *voters: Voter, documents: Documents | None = None) -> None:
        self.scorer = FakeScorer(5)
        self.harness = Harness(lambda _, i: voters[i].script or Script(voters[i].length), scorer=self.scorer)
        self.harness.engine.probe_width = 2
        self.confidence = Confidence(documents or Documents())
        self.sampling: Mapping[str, object] = {}
        self.outcomes: list[tuple[VoteOutcome, int]] = []
        self.votes = VoteRunner(
            self.harness.rollouts, self, self.confidence, self.vote_ended, AtOnce(), lambda: self.harness.engine.now
        )
        self._voters = {voter.length: voter for voter in voters}

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if prompt.text == "bad":
            raise InvalidRequest("text", "is bad")
        self.sampling = sampling
        return prompt.text or ""

    async def to_sample(self, output: list[int]) -> Sample:
        voter = self._voters[len(output)]
        logprobs = [voter.logprob] * len(output) if self.sampling.get("logprobs") else None
        text = "no answer" if voter.answer is None else f"so it is #{voter.answer}"
        return Sample(output, logprobs, text, FinishReason.STOP)

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        self.outcomes.append((outcome, stopped))

    async def run(self, vote: VoteRequest) -> VoteResult:
        waiting = asyncio.create_task(self.votes.run(vote))
        await settle()
        await self.harness.engine.run()
        return await waiting


def create_vote(n: int, **more: Any) -> VoteRequest:
    return VoteRequest(PromptSpec(text="p"), n, "#(.*)", **more)


def voters(answers: str, logprob: float = -1.0) -> list[Voter]:
    """Create a voter for each letter, its answer (``-``: none). Each is longer than the one before."""
    return [Voter(10 * (i + 1), None if a == "-" else a, logprob) for i, a in enumerate(answers)]


# --- stopping ---------------------------------------------------------------


async def test_candidates_are_stopped_once_the_leader_cannot_be_overtaken() -> None:
    election = Election(*voters("abaaabbb"))
    result = await election.run(create_vote(8))
    assert (result.tally.winner, dict(result.tally.votes)) == ("a", {"a": 4, "b": 1})
    assert result.decided_early
    assert [ballot.index for ballot in result.ballots] == [0, 1, 2, 3, 4]
    assert election.harness.engine.now == 50
    reasons = [candidate.reason for candidate in result.record.candidates]
    assert reasons == [None] * 5 + [DiscardReason.DECIDED] * 3
    assert result.record.outcome is Outcome.DECIDED
    assert (result.record.group_id, result.record.policy) == (result.vote_id, "vote")
    assert election.outcomes == [(VoteOutcome.DECIDED_EARLY, 3)]
    assert not election.harness.rollouts.runs
    assert election.harness.rollouts.gate.work_inside == 0


async def test_a_vote_without_answers_has_no_winner() -> None:
    election = Election(*voters("---"))
    result = await election.run(create_vote(3))
    assert (result.tally.winner, result.tally.vote_weights, result.decided_early) == (None, {}, False)
    assert election.outcomes == [(VoteOutcome.NO_ANSWER, 0)]


async def test_candidates_that_finish_in_the_deciding_step_count_too() -> None:
    """Candidates 2 and 3 finish with the deciding one, and 4 is stopped."""
    together = (Voter(length, "a", script=Script(length, delay=13 - length)) for length in (10, 11, 12, 13))
    election = Election(*together, Voter(99, "b"))
    result = await election.run(create_vote(5))
    assert [ballot.index for ballot in result.ballots] == [0, 1, 2, 3]
    assert [c.reason for c in result.record.candidates] == [None] * 4 + [DiscardReason.DECIDED]


async def test_a_vote_fails_with_its_group() -> None:
    election = Election(*(Voter(5, script=Script(5, error=CandidateFailed("broken"))) for _ in range(4)))
    with pytest.raises(CandidateFailed, match="broken"):
        await election.run(create_vote(2))
    assert election.outcomes == []
    assert election.harness.rollouts.gate.work_inside == 0


async def test_cancellation_stops_all_candidates() -> None:
    election = Election(*voters("aaa"))
    waiting = asyncio.create_task(election.votes.run(create_vote(3)))
    await settle()
    await election.harness.engine.step()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not election.harness.engine.running
    assert election.harness.recorder.records[0].outcome is Outcome.CANCELLED


# --- finding answers --------------------------------------------------------


def test_only_the_end_of_a_long_text_is_searched() -> None:
    for pattern in (r"(1)", "boxed", ["1"]):
        far, near = (r"\boxed{1}" + "." * (TEXT_CHARS - more) for more in (0, 9))
        assert [find_answer(create_extractor(pattern), text) for text in (far, near)] == [None, "1"]


# Each place of the text is in a longer word.
LONG_WORDS = create_extractor(["a" * length for length in range(1, 101)])
SLOW: list[Extractor] = [
    # Each match of the pattern tries all of the text.
    create_extractor("(.)(?:" + "(?:[a-z]?){999}" * 4 + "~)?"),
    # One search takes less than the limit on a fast machine.
    lambda text: chain.from_iterable(LONG_WORDS(text) for _ in range(20)),
]


@pytest.mark.parametrize("extract", SLOW)
async def test_a_search_that_takes_too_long_ends_and_does_not_block_the_event_loop(extract: Extractor) -> None:
    began, text = time.process_time(), f"x{'a' * TEXT_CHARS}x"
    with ThreadPoolExecutor(1) as searches:
        search = asyncio.get_running_loop().run_in_executor(searches, find_answer, extract, text)
        turns = 0
        while not search.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(InvalidRequest, match=r"pattern: took more than 0\.5 seconds of processor time"):
            await search
    assert turns > 10
    assert time.process_time() - began < 10


# --- weights ----------------------------------------------------------------


async def test_log_probs_are_requested_if_weights_are_computed_from_them() -> None:
    election = Election(Voter(10, "a", -2.0), Voter(20, "b", -0.5), Voter(30, "a", -3.0))
    result = await election.run(create_vote(3, weights="rank", score="logprob"))
    assert election.sampling == {"logprobs": True}
    assert not result.request.wants_logprobs
    assert (result.tally.winner, dict(result.tally.weights)) == ("b", {"b": 1.0, "a": 0.5})
    assert result.tally.vote_weights == {0: 0.5, 1: 1.0, 2: 0.0}
    await election.run(create_vote(3))
    assert election.sampling == {}


async def test_a_vote_without_a_score_gets_the_mean_of_the_others() -> None:
    election = Election(Voter(10, "a", -1.0), Voter(20, "b", float("nan")), Voter(30, "c", -3.0))
    result = await election.run(create_vote(3, weights="rank", score="logprob"))
    assert result.tally.vote_weights == {0: 1.0, 1: 0.5, 2: 0.0}
    assert result.ballots[1].score is None


def calibrated_confidence() -> Confidence:
    """Create one whose labels say: the higher the score, the likelier the trajectory is correct."""
    rng, confidence = Random(0), Confidence(Documents())
    for score in (rng.random() for _ in range(LABELS)):
        label = Label(score, float(rng.random() < score))
        for kind in LOGPROB_KINDS:
            confidence.points[kind].add(label)
    return confidence


async def test_log_odds_are_computed_from_probabilities_calibrated_by_rewards() -> None:
    election = Election(*voters("ab"))
    vote = create_vote(2, weights="log_odds", score="logprob")
    result = await election.run(vote)
    assert result.calibration is CalibrationStatus.NO_LABELS
    assert len(set(result.tally.vote_weights.values())) == 1, "without labels all weigh the same"
    election = Election(Voter(10, "a", -2.5), Voter(20, "b", -0.1), Voter(30, "a", -2.0))
    election.votes._confidence = calibrated_confidence()
    result = await election.run(replace(vote, n=3))
    assert (result.calibration, result.tally.winner) == (CalibrationStatus.READY, "b")


async def test_labels_are_taken_over_from_a_restored_store_and_not_written_over_it() -> None:
    documents = Documents()
    confidence = Confidence(documents)

    def learn() -> None:
        confidence.keep_scores((None, "vote"), {0: dict.fromkeys(LOGPROB_KINDS, 0.5)})
        confidence.learn_reward((None, "vote"), 0, True)

    def labels() -> list[int]:
        return [len(confidence.points[kind].calibrator.labels) for kind in LOGPROB_KINDS]

    learn()
    confidence._save_soon.run_pending()
    saved = dict(documents.kept)
    learn()
    documents.kept = {}
    confidence._save_soon.run_pending()
    assert documents.kept == {}
    assert labels() == [0] * len(LOGPROB_KINDS)
    documents.kept = saved
    learn()
    assert labels() == [2] * len(LOGPROB_KINDS), "one of which was restored"


async def test_labels_from_rewards_of_votes_survive_a_restart() -> None:
    documents = Documents()
    election = Election(*voters("a-"), documents=documents)
    result = await election.run(create_vote(2, sampling={"logprobs": True}))
    for index in (0, 1, 7):
        election.confidence.learn_reward((None, result.vote_id), index, True)
    election.confidence.learn_reward((None, "unknown"), 0, True)
    assert [election.confidence.points[kind].calibrator.status for kind in LOGPROB_KINDS] == [
        CalibrationStatus.FEW_LABELS
    ] * 2
    election.confidence._save_soon.run_pending()
    [label] = Confidence(documents).points["logprob"].calibrator.labels
    assert (label.score, label.target, label.survival) == pytest.approx((math.exp(-1.0), 1.0, 1.0))


async def test_votes_work_while_the_store_fails(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    confidence = Confidence(store)
    confidence.keep_scores((None, "vote"), {0: {"logprob": 0.5}})
    confidence.learn_reward((None, "vote"), 0, True)
    store.close()
    confidence._save_soon.run_pending()
    assert "cannot be read or saved" in caplog.text
    assert Confidence(store).points["logprob"].calibrator.status is CalibrationStatus.NO_LABELS


async def test_scores_of_the_newest_votes_are_remembered() -> None:
    confidence = Confidence(Documents(), kept=1)
    for name in ("old", "new"):
        confidence.keep_scores((None, name), {0: {"logprob": 0.5}})
        confidence.learn_reward((None, name), 0, True)
    confidence.learn_reward((None, "old"), 0, True)
    assert len(confidence.points["logprob"].calibrator.labels) == 2


async def test_votes_of_a_caller_do_not_displace_scores_of_another_caller() -> None:
    confidence = Confidence(Documents(), kept=3)
    for owner, name in (("victim", "vote"), *(("flooder", f"vote-{number}") for number in range(9))):
        confidence.keep_scores((owner, name), {0: {"logprob": 0.5}})
    confidence.learn_reward(("victim", "vote"), 0, True)
    assert len(confidence.points["logprob"].calibrator.labels) == 1


def scored_voter(length: int, answer: str | None, quality: float, lag: int = 0, delay: int = 0) -> Voter:
    return Voter(length, answer, script=Script(length, delay=delay, hidden=lambda _: (quality, SURVIVAL), lag=lag))


async def test_votes_by_quality_are_scored_and_no_candidate_is_pruned() -> None:
    """Candidate 2 finishes before its detection point."""
    election = Election(scored_voter(10, "a", 0.25), scored_voter(20, "b", 0.75), scored_voter(3, "c", 0.9))
    result = await election.run(create_vote(3, weights="rank", score="head"))
    assert [b.score for b in result.ballots] == [0.25, 0.75, None]
    assert result.tally.vote_weights == {0: 0.0, 1: 1.0, 2: 0.5}
    assert (result.tally.winner, result.decided_early, result.calibration) == ("b", False, None)
    assert election.scorer.kept == [(0, 1.0), (1, 1.0)], "the group can spare none, so all are kept with probability 1"
    assert election.scorer.dropped == []


async def test_candidates_that_a_decided_vote_stops_are_dropped_from_the_scorer() -> None:
    election = Election(*(scored_voter(length, "a", 0.75) for length in (10, 20, 30, 40)))
    result = await election.run(create_vote(4, weights="log_odds", score="head"))
    assert result.decided_early
    assert election.scorer.dropped == [
        i for i, c in enumerate(result.record.candidates) if c.reason is DiscardReason.DECIDED
    ]


async def test_a_score_that_arrives_after_its_candidate_has_finished_counts() -> None:
    election = Election(scored_voter(6, "a", 0.25, lag=9), scored_voter(30, "b", 0.5))
    result = await election.run(create_vote(2, weights="rank", score="head"))
    assert [b.score for b in result.ballots] == [0.25, 0.5]


# --- refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 65}, "n"),
        ({"pattern": "no group"}, "pattern"),
        ({"weights": "rank"}, "score"),
        ({"weights": "rank", "score": "head"}, "score"),
        ({"sampling": {"detokenize": False}}, "sampling.detokenize"),
        ({"prompt": PromptSpec(text="bad")}, "prompt"),
    ],
)
async def test_the_refusal_of_an_invalid_vote_names_the_field_and_no_candidate_starts(
    change: dict[str, Any], field: str
) -> None:
    election = Election(*voters("a"))
    election.harness.engine.probe_width = None  # so that nothing scores quality
    with pytest.raises(InvalidRequest) as refused:
        await election.votes.run(replace(create_vote(1), **change))
    assert refused.value.field == field
    assert not election.harness.engine.started


async def test_a_vote_waits_at_the_gate_and_counts_as_load() -> None:
    election = Election(*voters("aa"))
    rollouts = election.harness.rollouts
    rollouts.gate.close()
    waiting = asyncio.create_task(election.votes.run(create_vote(2)))
    await settle()
    assert (rollouts.admission.not_in_engine, len(election.harness.engine.started)) == (2, 0)
    rollouts.gate.open()
    await settle()
    assert (rollouts.admission.not_in_engine, len(election.harness.engine.started)) == (0, 2)
    await election.harness.engine.run()
    assert (await waiting).tally.winner == "a"


# --- whatever happens -------------------------------------------------------

SCORES: tuple[Score, ...] = ("logprob", "lowest_logprob", "head")
WEIGHTINGS: list[tuple[VoteWeights, Score | None]] = [
    ("majority", None),
    *(("rank", score) for score in SCORES),
    *(("log_odds", score) for score in SCORES),
]
CALIBRATED = calibrated_confidence()


@st.composite
def electorates(draw: st.DrawFn) -> list[Voter]:
    size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 20), min_size=size, max_size=size, unique=True))
    qualities = [draw(st.sampled_from([0.0625, 0.25, 0.5, 0.75])) for _ in lengths]
    hidden = [lambda _, quality=quality: (quality, SURVIVAL) for quality in qualities]
    return [
        Voter(
            length,
            draw(st.sampled_from(["a", "b", "c", None])),
            -draw(st.sampled_from([0.05, 0.4, 1.0, 3.0])),
            Script(length, draw(st.integers(0, 10)), hidden=hidden[i], lag=draw(st.integers(0, 3))),
        )
        for i, length in enumerate(lengths)
    ]


async def collect_all(
    votes: VoteRunner[str, list[int]],
    run: GroupRun[str, list[int]],
    extract: Extractor,
    box: BallotBox[str, list[int]],
) -> bool:
    """Collect all ballots, even when the vote is decided."""
    async for trajectory in run.trajectories():
        sample = await votes._renderer.to_sample(trajectory.output)
        box.ballots.append(Ballot(trajectory.index, sample, find_answer(extract, sample.text)))
        box.is_decided([])  # a ballot keeps its first score
    return False


@given(electorates(), st.sampled_from(WEIGHTINGS), st.booleans())
def test_a_vote_that_ends_early_has_the_winner_of_all_its_candidates(
    electorate: list[Voter], weighting: tuple[VoteWeights, Score | None], has_choices: bool
) -> None:
    weights, score = weighting
    pattern: str | list[str] = ["a", "b", "c"] if has_choices else "#(.*)"

    async def play(waits_for_all: bool) -> VoteResult:
        election = Election(*electorate)
        election.votes._confidence = CALIBRATED
        if waits_for_all:
            election.votes._collect = partial(collect_all, election.votes)  # type: ignore[method-assign]  # early stops are left out
        return await election.run(VoteRequest(PromptSpec(text="p"), len(electorate), pattern, weights, score))

    result, whole = asyncio.run(play(waits_for_all=False)), asyncio.run(play(waits_for_all=True))
    assert len(whole.ballots) == len(electorate)
    assert result.tally.winner == whole.tally.winner
    assert result.decided_early == (len(result.ballots) < len(electorate))
    for ballot in result.ballots:
        assert ballot.answer == electorate[ballot.index].answer
