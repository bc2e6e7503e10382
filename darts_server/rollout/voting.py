import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Generic, Literal

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.estimates.answers import Extractor, create_extractor
from darts_server.estimates.calibration import Calibration, CalibrationStatus, Label
from darts_server.exceptions import InvalidRequest, StateError
from darts_server.group.selection import InOrder
from darts_server.policy.survival import Pruning
from darts_server.policy.voting import (
    Tally,
    Vote,
    count_votes,
    create_weighting,
    is_decided,
)
from darts_server.records import GroupKey, GroupRecord
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.learned.documents import BlobStore, Debounce, DocumentStore
from darts_server.rollout.observers.provenance import DEFAULT_KEPT
from darts_server.rollout.plan import UNSHAPED, Plan
from darts_server.rollout.pruning.scoring import VOTE_BLOBS, DetectionPoint, ScoreKind, logprob_score
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.fair_cache import FairCache
from darts_server.types import OFF, DiscardReason, PromptSpec, RequestOptions, Sample, VoteOutcome, VoteWeights

logger = logging.getLogger(__name__)

LOGPROB_KINDS = (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB)
CALIBRATION = Calibration(cold_steps=0)
"""Votes are for test time, when the trainer makes no steps."""
SAVE_SECONDS = 2.0
"""Seconds between two writes of up to 100 KB."""
POLICY = "vote"
LOGPROBS = "logprobs"
DEFAULT_SCORE = 0.5
"""Score of all votes if no vote has a score."""
MAX_DECISION_CHECKS = 64
"""A check of a thousand trajectories takes 20 ms or more."""
TEXT_CHARS = 16_384
"""Only the end of a text is searched."""
SEARCH_SECONDS = 0.5
"""Processor time for one text. A linear pattern takes milliseconds. A match of RE2 cannot be interrupted, but
`TEXT_CHARS` and the largest pattern limit it to 3 seconds."""

Score = Literal["head", "logprob", "lowest_logprob"]


class Confidence:
    """Turns scores into probabilities of being correct, by the rewards of the newest ``kept`` votes."""

    def __init__(
        self,
        documents: DocumentStore,
        kept: int = DEFAULT_KEPT,
        calibration: Calibration = CALIBRATION,
    ) -> None:
        blobs = BlobStore(documents, VOTE_BLOBS)
        self.points: Mapping[str, DetectionPoint] = {
            kind: DetectionPoint(
                blobs,
                kind,
                calibration,
                width=0,
                name=f"of votes by {kind}",
            )
            for kind in LOGPROB_KINDS
        }
        # By group id, candidate index and kind.
        self._scores: FairCache[str, Mapping[int, Mapping[str, float]]] = FairCache(kept)
        self._save_soon = Debounce(SAVE_SECONDS, lambda: self._sync_with_store(save=True))
        self._sync_with_store()

    def keep_scores(self, group: GroupKey, scores: Mapping[int, Mapping[str, float]]) -> None:
        """``scores``: `logprob_scores` by candidate index, kept until the trajectories have rewards."""
        self._sync_with_store()
        owner, group_id = group
        self._scores.put(owner, group_id, scores)

    def learn_reward(self, group: GroupKey, index: int, correct: bool) -> None:
        owner, group_id = group
        scores_by_index = self._scores.entries_of(owner).get(group_id, {})
        for kind, score in scores_by_index.get(index, {}).items():
            self.points[kind].add(Label(score, float(correct)))
            self._save_soon.request()

    def _sync_with_store(self, *, save: bool = False) -> None:
        try:
            # After the start, `reload` loads labels only if a restore has replaced them.
            for point in self.points.values():
                point.reload()
            if save:
                for point in self.points.values():
                    point.save()
        except StateError as error:
            logger.warning("the calibration of votes cannot be read or saved: %s", error)


def logprob_scores(sample: Sample) -> dict[str, float]:
    """Return scores by kind, in [0, 1]; empty without finite log-probs."""
    logprobs = tuple(sample.logprobs or ())
    scores = {kind: logprob_score(kind, logprobs) for kind in LOGPROB_KINDS}
    return {kind: score for kind, score in scores.items() if score is not None}


@dataclass(frozen=True, slots=True)
class VoteRequest:
    prompt: PromptSpec
    n: int
    pattern: str | Sequence[str]
    """See `create_extractor`."""
    weights: VoteWeights = "majority"
    score: Score | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        logprobs = self.sampling.get(LOGPROBS)
        return logprobs is not None and logprobs is not False

    @property
    def uses_logprobs(self) -> bool:
        return self.score in LOGPROB_KINDS

    @property
    def uses_quality(self) -> bool:
        return self.score == "head" and self.weights != "majority"


@dataclass(slots=True)
class Ballot:
    index: int
    sample: Sample
    answer: str | None
    score: float | None = None
    vote: Vote | None = None
    """None without an answer or a score. A vote never changes, because it may have decided an election."""


class BallotBox(Generic[RequestT, OutputT]):
    """``calibrate``: turns a candidate's score into the score of its vote."""

    def __init__(
        self,
        vote: VoteRequest,
        run: GroupRun[RequestT, OutputT],
        calibrate: Callable[[float], float],
    ) -> None:
        self.ballots: list[Ballot] = []
        self._vote = vote
        self._run = run
        self._calibrate = calibrate
        self._weighting = create_weighting(vote.weights, vote.pattern)

    def is_decided(self, remaining: Sequence[int]) -> bool:
        """Whether the winner is certain, whatever ``remaining`` candidates answer."""
        votes, unscored = self._make_votes()
        # A vote without a score can still get any weight.
        missing = [*remaining, *(vote.index for vote in unscored)]
        # All missing votes may be for the same other answer, so this saves the slow check.
        if len(votes) < len(missing):
            return False
        return is_decided(votes, missing, self._weighting)

    def count(self) -> Tally:
        """Count the votes. A vote without a score gets the mean score."""
        votes, unscored = self._make_votes()
        mean_score = fmean(vote.score for vote in votes) if votes else DEFAULT_SCORE
        votes += [replace(vote, score=mean_score) for vote in unscored]
        return count_votes(votes, self._weighting)

    def _make_votes(self) -> tuple[list[Vote], list[Vote]]:
        kind = self._vote.score
        votes: list[Vote] = []
        unscored: list[Vote] = []
        for ballot in self.ballots:
            if ballot.answer is None:
                continue
            if ballot.vote is not None:
                votes.append(ballot.vote)
                continue

            vote = Vote(ballot.index, ballot.answer, DEFAULT_SCORE)
            if self._vote.weights != "majority" and kind is not None:
                if self._vote.uses_logprobs:
                    ballot.score = logprob_scores(ballot.sample).get(kind)
                else:
                    # The score may arrive after the candidate has finished.
                    ballot.score = self._run.candidates[ballot.index].quality
                if ballot.score is None:
                    unscored.append(vote)
                    continue
                vote = replace(vote, score=self._calibrate(ballot.score))
            ballot.vote = vote
            votes.append(vote)
        return votes, unscored


@dataclass(frozen=True, slots=True)
class VoteResult:
    vote_id: str
    request: VoteRequest
    sampling: Mapping[str, object]
    """With defaults, and without log-probs that only scores need."""
    tally: Tally
    ballots: Sequence[Ballot]
    """In order of candidates."""
    decided_early: bool
    calibration: CalibrationStatus | None
    """None if no calibration was needed."""
    record: GroupRecord
    seconds: float


class VoteRunner(Generic[RequestT, OutputT]):
    """Lets trajectories of a prompt vote, and stops candidates that can no longer change the answer.

    Args:
        vote_ended: called with the outcome and the number of stopped candidates.
        searches: runs the callers' patterns outside the event loop.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        confidence: Confidence,
        vote_ended: Callable[[VoteOutcome, int], object],
        searches: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._confidence = confidence
        self._vote_ended = vote_ended
        self._searches = searches
        self._clock = clock

    async def run(self, vote: VoteRequest) -> VoteResult:
        """Sample and count until the answer is certain.

        Raises:
            InvalidRequest: names the field.
            Overloaded, QuotaReached
            EngineError, GroupFailed, GroupAborted: too few candidates could finish.
        """
        self._check(vote)
        sampling = self._renderer.effective_sampling(vote.sampling)
        vote_id = f"vote-{uuid.uuid4().hex}"
        with self._rollouts.admission.admit(vote.n) as ticket:
            extract = create_extractor(vote.pattern)
            request_sampling = dict(vote.sampling)
            if vote.uses_logprobs and not vote.wants_logprobs:
                request_sampling[LOGPROBS] = True
            try:
                request = await self._renderer.make_request(vote.prompt, request_sampling, vote.n, vote_id)
            except InvalidRequest as error:
                # In a vote the prompt is a single field.
                if error.field in ("text", "token_ids"):
                    raise InvalidRequest("prompt", error.message) from error
                raise
            calibration = None
            if vote.weights == "log_odds" and vote.uses_logprobs and vote.score is not None:
                point = self._confidence.points[vote.score]
                calibration = point.calibrator.status

            def calibrate(score: float) -> float:
                if calibration is None:
                    return score
                if calibration is CalibrationStatus.READY:
                    return point.calibrator.probability(score)
                # Without a calibration all votes are equal.
                return DEFAULT_SCORE

            shaping = UNSHAPED
            if vote.uses_quality:
                # A keep ratio of 1 scores candidates, and prunes none.
                shaping = replace(UNSHAPED, pruning=Pruning(keep_ratio=1.0))
            spec = GroupSpec(
                Plan(POLICY, shaping, vote.n),
                request,
                vote_id,
                prompt_key=vote.prompt.key or self._renderer.prompt_key(request),
                tail_seed=self._renderer.tail_seed(request),
                delivers_early=True,
                request_tokens=self._renderer.known_token_counts(request),
            )
            started_at = self._clock()
            async with self._rollouts.gate.enter():
                # The group releases its ticket when it ends. `ticket` counts the request until its answer.
                group_ticket = ticket.split(vote.n)
                run = self._rollouts.create_run(spec, ticket=group_ticket)
                run.open(InOrder(vote.n), Allocation(vote.n))
                box = BallotBox(vote, run, calibrate)
                decided_early = await self._collect(run, extract, box)

        record = run.record
        assert record is not None
        tally = box.count()
        ballots = sorted(box.ballots, key=lambda ballot: ballot.index)
        scores = {ballot.index: logprob_scores(ballot.sample) for ballot in ballots if ballot.answer is not None}
        self._confidence.keep_scores(record.key, scores)
        if tally.winner is None:
            outcome = VoteOutcome.NO_ANSWER
        elif decided_early:
            outcome = VoteOutcome.DECIDED_EARLY
        else:
            outcome = VoteOutcome.COUNTED
        stopped = sum(candidate.reason is DiscardReason.DECIDED for candidate in record.candidates)
        self._vote_ended(outcome, stopped)
        seconds = self._clock() - started_at
        return VoteResult(
            vote_id=vote_id,
            request=vote,
            sampling=sampling,
            tally=tally,
            ballots=ballots,
            decided_early=decided_early,
            calibration=calibration,
            record=record,
            seconds=seconds,
        )

    def _check(self, vote: VoteRequest) -> None:
        # The planner refuses sizes beyond the limit.
        self._rollouts.plan(vote.n, RequestOptions(OFF))
        if vote.sampling.get("detokenize") is False:
            raise InvalidRequest("sampling.detokenize", "must not be false: answers are extracted from text")
        if vote.weights != "majority" and vote.score is None:
            scores = ", ".join(("head", *LOGPROB_KINDS))
            raise InvalidRequest("score", f"is required for weights {vote.weights!r}: one of {scores}")
        if vote.uses_quality and not self._rollouts.can_score:
            raise InvalidRequest(
                "score", f"this server does not score quality (see --quality); choose {' or '.join(LOGPROB_KINDS)}"
            )

    async def _collect(
        self, run: GroupRun[RequestT, OutputT], extract: Extractor, box: BallotBox[RequestT, OutputT]
    ) -> bool:
        loop = asyncio.get_running_loop()
        collected: set[int] = set()
        check_interval = max(1, len(run.candidates) // MAX_DECISION_CHECKS)
        async with aclosing(run.trajectories()) as trajectories:
            async for trajectory in trajectories:
                collected.add(trajectory.index)
                sample = await self._renderer.to_sample(trajectory.output)
                answer = await loop.run_in_executor(self._searches, find_answer, extract, sample.text)
                box.ballots.append(Ballot(trajectory.index, sample, answer))
                # Collect all finished candidates before a check.
                if run.has_ended or not run.deliveries.empty() or len(collected) % check_interval:
                    continue
                remaining = [c.index for c in run.candidates if c.is_alive and c.index not in collected]
                if box.is_decided(remaining):
                    run.end_with_delivered()
                    return True
        return False


def find_answer(extract: Extractor, text: str) -> str | None:
    """Return the last answer in a text, or None.

    Raises:
        InvalidRequest: the pattern took too long.
    """
    deadline = time.thread_time() + SEARCH_SECONDS
    answer = None
    for found in extract(text[-TEXT_CHARS:]):
        answer = found
        if time.thread_time() > deadline:
            break
    # The search after the last answer may have taken long.
    if time.thread_time() > deadline:
        raise InvalidRequest(
            "pattern",
            f"took more than {SEARCH_SECONDS:g} seconds of processor time to find the answer of one trajectory, so "
            "the vote has ended; use a simpler pattern",
        )
    return answer
