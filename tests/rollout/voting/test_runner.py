"""Votes on the scripted engine."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.engine.port import Probed
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, InvalidRequest, Overloaded
from darts_server.observers import VoteObserver
from darts_server.policy.pruning.calibration import BUFFER, CalibrationStatus
from darts_server.policy.pruning.survival import Pruning
from darts_server.rollout.learned.blobs import BlobStore
from darts_server.rollout.pruning.scorer import Assessment
from darts_server.rollout.run import GroupRun
from darts_server.rollout.voting.ballots import SHORT_TEXT, BallotBox, extractor_of, weighting_of
from darts_server.rollout.voting.confidence import KINDS, Confidence
from darts_server.rollout.voting.runner import VoteRequest, VoteResult, VoteRunner
from darts_server.serving.admission import Admission, Bounds
from darts_server.store import Store
from darts_server.types import DiscardReason, FinishReason, Outcome, PromptSpec, Sample, VoteOutcome
from tests.rollout.helpers import Documents, House

pytestmark = pytest.mark.anyio
LABELS = 300


@dataclass(frozen=True)
class Voter:
    """A candidate that ends after ``length`` tokens. ``sure``: the log-prob of each of them."""

    length: int
    answer: str | None = None
    sure: float = -1.0
    script: Script | None = None


class Opinion:
    """A scorer whose score is the hidden state itself."""

    detect_at = (5,)
    uses_hidden_states = True
    uses_logprobs = False

    def __init__(self) -> None:
        self.kept: list[tuple[int, float]] = []
        self.gone: list[int] = []

    def score_state(
        self, group_id: str, index: int, probed: Probed, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Assessment:
        return Assessment(float(probed.state[0]), 0.1)

    def score_logprobs(self, group_id: str, index: int, logprobs: tuple[float, ...], pruning: Pruning) -> Assessment:
        raise NotImplementedError

    def record_kept(self, group_id: str, index: int, survival: float) -> None:
        self.kept.append((index, survival))

    def record_dropped(self, group_id: str, index: int) -> None:
        self.gone.append(index)


class Booth(VoteObserver):
    """A house in which candidate i is the i-th voter. Their lengths differ: by these the prompter knows them."""

    def __init__(self, *voters: Voter, documents: Documents | None = None) -> None:
        self._script = lambda _, i: voters[i].script or Script(voters[i].length)
        self.house = House(self._script)
        self.scorer = Opinion()
        self.confidence = Confidence(documents or Documents())
        self.sampling: Mapping[str, object] = {}
        self.ended: list[tuple[VoteOutcome, int]] = []
        self.votes = VoteRunner(self.house.rollouts, self, self.confidence, self, lambda: self.house.engine.now)
        self._voters = {voter.length: voter for voter in voters}

    async def request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if prompt.text == "bad":
            raise InvalidRequest("text", "is bad")
        self.sampling = sampling
        return prompt.text or ""

    def key(self, request: str) -> str:
        return f"key of {request}"

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return None

    def sample(self, output: list[int]) -> Sample:
        voter = self._voters[len(output)]
        logprobs = [voter.sure] * len(output) if self.sampling.get("logprobs") else None
        text = "no answer" if voter.answer is None else f"so it is #{voter.answer}"
        return Sample(output, logprobs, text, FinishReason.STOP)

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        self.ended.append((outcome, stopped))

    def with_scorer(self) -> "Booth":
        """Score candidates by their hidden states."""
        self.house = House(self._script, scorer=self.scorer)
        self.house.engine.probe_width = 1
        self.votes = VoteRunner(self.house.rollouts, self, self.confidence, self, lambda: self.house.engine.now)
        return self

    async def run(self, question: VoteRequest) -> VoteResult:
        waiting = asyncio.create_task(self.votes.run(question))
        await settle()
        await self.house.engine.run()
        return await waiting


def question(n: int, **more: object) -> VoteRequest:
    return VoteRequest(PromptSpec(text="p"), n, "#(.*)", **more)  # type: ignore[arg-type]


def voters(answers: str, sure: float = -1.0) -> list[Voter]:
    """One for each letter, which is its answer; ``-`` has none. Each is longer than the one before."""
    return [Voter(10 * (i + 1), None if a == "-" else a, sure) for i, a in enumerate(answers)]


# --- stopping ---------------------------------------------------------------


async def test_the_rest_is_stopped_once_the_leader_cannot_be_caught() -> None:
    booth = Booth(*voters("abaaabbb"))
    result = await booth.run(question(8))
    assert (result.count.tally.winner, dict(result.count.tally.votes)) == ("a", {"a": 4, "b": 1})
    assert result.decided_early
    assert [ballot.index for ballot in result.ballots] == [0, 1, 2, 3, 4]
    assert booth.house.engine.now == 50
    reasons = [candidate.reason for candidate in result.record.candidates]
    assert reasons == [None] * 5 + [DiscardReason.DECIDED] * 3
    assert result.record.outcome is Outcome.DECIDED
    assert booth.ended == [(VoteOutcome.DECIDED_EARLY, 3)]
    assert booth.house.rollouts.running == 0
    assert booth.house.rollouts.gate.inside == 0


async def test_a_close_vote_waits_for_all() -> None:
    booth = Booth(*voters("abba"))
    result = await booth.run(question(4))
    assert (result.count.tally.winner, result.decided_early) == ("a", False)
    assert len(result.ballots) == 4
    assert result.record.outcome is Outcome.COMPLETED
    assert booth.ended == [(VoteOutcome.COUNTED, 0)]


async def test_trajectories_without_an_answer_have_no_vote() -> None:
    booth = Booth(*voters("--a"))
    result = await booth.run(question(3))
    assert (result.count.tally.winner, result.count.weights) == ("a", {2: 1.0})
    assert [ballot.answer for ballot in result.ballots] == [None, None, "a"]


async def test_without_any_answer_there_is_none() -> None:
    booth = Booth(*voters("---"))
    result = await booth.run(question(3))
    assert (result.count.tally.winner, result.count.weights, result.decided_early) == (None, {}, False)
    assert booth.ended == [(VoteOutcome.NO_ANSWER, 0)]


async def test_what_ended_in_the_same_step_counts_though_it_is_not_needed() -> None:
    """Candidates 2 and 3 end with the one that decides, and 4 is stopped."""
    steps = [Script(10), Script(11, delay=0), Script(12), Script(13), Script(99)]
    booth = Booth(*(Voter(s.length, "a", script=replace(s, delay=13 - s.length)) for s in steps[:4]), Voter(99, "b"))
    result = await booth.run(question(5))
    assert [ballot.index for ballot in result.ballots] == [0, 1, 2, 3]
    assert [c.reason for c in result.record.candidates] == [None] * 4 + [DiscardReason.DECIDED]


async def test_a_failed_candidate_is_replaced() -> None:
    broken = Voter(5, script=Script(5, error=CandidateFailed("broken")))
    booth = Booth(broken, *voters("ab"), Voter(35, "b"))
    result = await booth.run(question(3))
    assert dict(result.count.tally.votes) == {"b": 2, "a": 1}
    assert [ballot.index for ballot in result.ballots] == [1, 2, 3]


async def test_a_vote_fails_with_its_group() -> None:
    booth = Booth(*(Voter(5, script=Script(5, error=CandidateFailed("broken"))) for _ in range(4)))
    with pytest.raises(CandidateFailed, match="broken"):
        await booth.run(question(2))
    assert booth.ended == []
    assert booth.house.rollouts.gate.inside == 0


async def test_a_caller_that_leaves_stops_all() -> None:
    booth = Booth(*voters("aaa"))
    waiting = asyncio.create_task(booth.votes.run(question(3)))
    await settle()
    await booth.house.engine.step()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not booth.house.engine.running
    assert booth.house.recorder.records[0].outcome is Outcome.CANCELLED


async def test_long_texts_are_searched_too() -> None:
    booth = Booth(Voter(10, "y" * SHORT_TEXT))
    waiting = asyncio.create_task(booth.votes.run(question(1)))
    await settle()
    await booth.house.engine.run()
    assert (await waiting).count.tally.winner == "y" * SHORT_TEXT


# --- weights ----------------------------------------------------------------


async def test_log_probs_are_asked_for_where_votes_are_weighed_by_them() -> None:
    booth = Booth(Voter(10, "a", -2.0), Voter(20, "b", -0.5), Voter(30, "a", -3.0))
    result = await booth.run(question(3, weights="rank", score="logprob"))
    assert booth.sampling == {"logprobs": True}
    assert not result.question.wants_logprobs
    assert (result.count.tally.winner, dict(result.count.tally.weights)) == ("b", {"b": 1.0, "a": 0.5})
    assert result.count.weights == {0: 0.5, 1: 1.0, 2: 0.0}
    await booth.run(question(3))
    assert booth.sampling == {}


async def test_a_trajectory_without_a_score_gets_the_mean_of_the_others() -> None:
    booth = Booth(Voter(10, "a", -1.0), Voter(20, "b", float("nan")), Voter(30, "c", -3.0))
    result = await booth.run(question(3, weights="rank", score="logprob"))
    assert result.count.weights == {0: 1.0, 1: 0.5, 2: 0.0}
    assert result.ballots[1].score is None


async def test_without_any_score_all_weigh_the_same_and_nothing_is_decided_early() -> None:
    booth = Booth(*voters("aaab", sure=float("-inf")))
    result = await booth.run(question(4, weights="rank", score="lowest_logprob"))
    assert (result.count.tally.winner, result.decided_early) == ("a", False)
    assert set(result.count.weights.values()) == {0.5}


def trained() -> Confidence:
    """One that knows: the likelier a trajectory, the likelier it is right."""
    rng, documents = Random(0), Documents()
    labels = [(score, float(rng.random() < score), 1.0) for score in (rng.random() for _ in range(LABELS))]
    for kind in KINDS:
        data = np.asarray(labels, dtype="<f8").tobytes()
        BlobStore(documents, "vote").save(kind, data, {"steps": 0, "width": 0})
    return Confidence(documents)


async def test_log_odds_are_of_what_rewards_said() -> None:
    booth = Booth(*voters("ab"))
    asked = question(2, weights="log_odds", score="logprob")
    result = await booth.run(asked)
    assert result.calibration is CalibrationStatus.NO_LABELS
    assert len(set(result.count.weights.values())) == 1, "nothing is known, so all weigh the same"
    booth = Booth(Voter(10, "a", -2.5), Voter(20, "b", -0.1), Voter(30, "a", -2.0))
    booth.votes._confidence = trained()
    result = await booth.run(replace(asked, n=3))
    assert (result.calibration, result.count.tally.winner) == (CalibrationStatus.READY, "b")


async def test_rewards_of_votes_are_what_scores_are_worth_and_outlive_a_restart() -> None:
    documents = Documents()
    booth = Booth(*voters("a-"), documents=documents)
    result = await booth.run(question(2, sampling={"logprobs": True}))
    for index in (0, 1, 7):
        booth.confidence.learn_reward(result.vote_id, index, 1.0, True)
    booth.confidence.learn_reward("unknown", 0, 1.0, True)
    assert [booth.confidence.status(kind) for kind in KINDS] == [CalibrationStatus.FEW_LABELS] * 2
    booth.confidence._keep.run_pending()
    [label] = Confidence(documents)._points["logprob"].calibrator.state.labels
    assert label == pytest.approx((math.exp(-1.0), 1.0, 1.0))


async def test_as_many_labels_as_are_remembered_outlive_a_restart() -> None:
    with Store() as store:
        confidence, rng = Confidence(store), Random(0)
        for number in range(BUFFER):
            confidence.remember("vote", {number: {kind: rng.random() for kind in KINDS}})
            confidence.learn_reward("vote", number, 1.0, True)
        confidence._keep.run_pending()
        for kind in KINDS:
            assert len(Confidence(store)._points[kind].calibrator.state.labels) == BUFFER


async def test_votes_that_cannot_be_kept_or_read_are_counted_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    confidence = Confidence(store)
    confidence.remember("vote", {0: {"logprob": 0.5}})
    confidence.learn_reward("vote", 0, 1.0, True)
    store.close()
    confidence._keep.run_pending()
    assert "was not kept" in caplog.text
    assert Confidence(store).status("logprob") is CalibrationStatus.NO_LABELS
    assert "cannot be read" in caplog.text


async def test_only_the_newest_votes_are_remembered() -> None:
    confidence = Confidence(Documents(), kept=1)
    for name in ("old", "new"):
        confidence.remember(name, {0: {"logprob": 0.5}})
        confidence.learn_reward(name, 0, 1.0, True)
    confidence.learn_reward("old", 0, 1.0, True)
    assert len(confidence._points["logprob"].calibrator.state.labels) == 2


def scored(length: int, answer: str | None, quality: float, lag: int = 0, delay: int = 0) -> Voter:
    return Voter(length, answer, script=Script(length, delay=delay, hidden=lambda _: [quality], lag=lag))


async def test_votes_by_quality_are_scored_and_nobody_is_pruned() -> None:
    """Candidate 2 ends before it could be scored."""
    booth = Booth(scored(10, "a", 0.25), scored(20, "b", 0.75), scored(3, "c", 0.9)).with_scorer()
    result = await booth.run(question(3, weights="rank", score="head"))
    assert [b.score and b.score.value for b in result.ballots] == [0.25, 0.75, None]
    assert result.count.weights == {0: 0.0, 1: 1.0, 2: 0.5}
    assert (result.count.tally.winner, result.decided_early, result.calibration) == ("b", False, None)
    assert booth.scorer.kept == [(0, 1.0), (1, 1.0)], "none can be spared, so all are kept for sure"
    assert booth.scorer.gone == []


async def test_the_judge_forgets_whom_the_vote_does_not_wait_for() -> None:
    booth = Booth(*(scored(length, "a", 0.75) for length in (10, 20, 30, 40))).with_scorer()
    result = await booth.run(question(4, weights="log_odds", score="head"))
    assert result.decided_early
    assert booth.scorer.gone == [i for i, c in enumerate(result.record.candidates) if c.reason is DiscardReason.DECIDED]


async def test_a_majority_has_nobody_scored() -> None:
    booth = Booth(scored(10, "a", 0.25), scored(20, "b", 0.75)).with_scorer()
    await booth.run(question(2, score="head"))
    assert booth.scorer.kept == []


async def test_a_score_that_comes_after_the_end_counts() -> None:
    booth = Booth(scored(6, "a", 0.25, lag=9), scored(30, "b", 0.5)).with_scorer()
    result = await booth.run(question(2, weights="rank", score="head"))
    assert [b.score and b.score.value for b in result.ballots] == [0.25, 0.5]


# --- refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 65}, "n"),
        ({"pattern": "no group"}, "pattern"),
        ({"pattern": ["a", ""]}, "pattern.choices"),
        ({"weights": "heavy", "score": "logprob"}, "weights"),
        ({"weights": "rank"}, "score"),
        ({"weights": "rank", "score": "luck"}, "score"),
        ({"weights": "rank", "score": "head"}, "score"),
        ({"sampling": {"detokenize": False}}, "sampling.detokenize"),
        ({"prompt": PromptSpec(text="bad")}, "prompt"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_field_and_starts_nothing(change: dict[str, object], field: str) -> None:
    booth = Booth(*voters("a"))
    with pytest.raises(InvalidRequest) as refused:
        await booth.votes.run(replace(question(1), **change))  # type: ignore[arg-type]
    assert refused.value.field == field
    assert not booth.house.engine.started


async def test_a_vote_passes_the_gate_and_counts_as_load() -> None:
    booth = Booth(*voters("aa"))
    rollouts = booth.house.rollouts
    rollouts.gate.close()
    waiting = asyncio.create_task(booth.votes.run(question(2)))
    await settle()
    assert (rollouts.admission.ahead, len(booth.house.engine.started)) == (2, 0)
    rollouts.gate.open()
    await settle()
    assert (rollouts.admission.ahead, len(booth.house.engine.started)) == (0, 2)
    await booth.house.engine.run()
    assert (await waiting).count.tally.winner == "a"


async def test_a_vote_is_refused_while_too_much_waits() -> None:
    booth = Booth(*voters("aa"))
    booth.house.rollouts.admission = Admission(lambda: 9, 1, Bounds(most_waiting=1))
    with pytest.raises(Overloaded):
        await booth.votes.run(question(2))


# --- whatever happens -------------------------------------------------------

WAYS = [("majority", None), *((w, s) for w in ("rank", "log_odds") for s in (*KINDS, "head"))]
TRAINED = trained()


@st.composite
def electorates(draw: st.DrawFn) -> list[Voter]:
    size = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 20), min_size=size, max_size=size, unique=True))
    qualities = [draw(st.sampled_from([0.0625, 0.25, 0.5, 0.75])) for _ in lengths]
    hidden = [lambda _, quality=quality: [quality] for quality in qualities]
    return [
        Voter(
            length,
            draw(st.sampled_from(["a", "b", "c", None])),
            -draw(st.sampled_from([0.05, 0.4, 1.0, 3.0])),
            Script(length, draw(st.integers(0, 10)), hidden=hidden[i], lag=draw(st.integers(0, 3))),
        )
        for i, length in enumerate(lengths)
    ]


async def everyone(votes: VoteRunner[str, list[int]], run: GroupRun[str, list[int]], poll: BallotBox) -> bool:
    """Wait for all, decided or not."""
    async for trajectory in run.trajectories():
        await poll.take(trajectory.index, votes._prompter.sample(trajectory.output))
        poll.decided([])  # scores count from the moment they are known
    return False


@given(electorates(), st.sampled_from(WAYS), st.booleans())
def test_a_vote_that_ends_early_has_the_winner_of_all_its_candidates(
    electorate: list[Voter], way: tuple[str, str | None], listed: bool
) -> None:
    weights, score = way
    pattern: str | list[str] = ["a", "b", "c"] if listed else "#(.*)"

    async def play(patient: bool) -> VoteResult:
        booth = Booth(*electorate).with_scorer()
        booth.votes._confidence = TRAINED
        if patient:
            booth.votes._collect = partial(everyone, booth.votes)  # type: ignore[method-assign]
        return await booth.run(VoteRequest(PromptSpec(text="p"), len(electorate), pattern, weights, score))

    result, whole = asyncio.run(play(patient=False)), asyncio.run(play(patient=True))
    assert len(whole.ballots) == len(electorate)
    assert result.count.tally.winner == whole.count.tally.winner
    assert result.decided_early == (len(result.ballots) < len(electorate))
    for ballot in result.ballots:
        assert ballot.answer == electorate[ballot.index].answer


def test_choices_are_found_and_weighed_as_such() -> None:
    assert extractor_of(["yes", "no"]).extract("yes or no? yes") == "yes"
    assert extractor_of("boxed").extract(r"\boxed{7}") == "7"
    assert weighting_of("log_odds", ["yes", "no"]) == weighting_of("log_odds", ["only"])
