"""Votes of several trajectories of one prompt, which stop early once the remaining ones cannot change the answer.

Weights can be computed from log-probs: the mean and the lowest mean log-prob (`rollout.pruning.scoring`). `Confidence`
turns these into probabilities of being correct, once rewards came for trajectories of votes.
"""

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
from darts_server.estimates.calibration import Calibration, CalibrationStatus, Label
from darts_server.exceptions import InvalidRequest, StateError
from darts_server.group.selection import InOrder
from darts_server.policy.survival import Pruning
from darts_server.policy.voting import (
    Extractor,
    Tally,
    Vote,
    count_votes,
    create_extractor,
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
from darts_server.serving.kept import Kept
from darts_server.types import OFF, DiscardReason, PromptSpec, RequestOptions, Sample, VoteOutcome, VoteWeights

logger = logging.getLogger(__name__)

KINDS = (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB)
CALIBRATION = Calibration(cold_steps=0)
"""Votes are for test time, where the trainer makes no steps."""
SAVE_SECONDS = 2.0
"""Between two writes of up to some 100 KB for each kind."""
POLICY = "vote"
"""Under this name the groups of votes are recorded. They are not shaped."""
LOGPROBS = "logprobs"
DEFAULT_SCORE = 0.5
"""Of all votes if none has a score: equal scores give equal weights."""
MAX_DECISION_CHECKS = 64
"""Per vote. With a thousand trajectories one check takes 20 ms or more."""
TEXT_CHARS = 16_384
"""Characters that are searched, from the end of a text. An answer before them is not found."""
SEARCH_SECONDS = 0.5
"""Processor time for one text. A pattern that is linear in the text takes some milliseconds for the longest text. A
match of RE2 cannot be ended, but is bounded by `TEXT_CHARS` and by the largest pattern: the worst takes 3 seconds, in
which the event loop is served. Between matches, and in a search for boxes or choices, it is served within 30 ms."""

Score = Literal["head", "logprob", "lowest_logprob"]


class Confidence:
    """Calibrates scores, by the rewards of trajectories with an answer in the newest ``kept`` votes."""

    def __init__(
        self, documents: DocumentStore, kept: int = DEFAULT_KEPT, calibration: Calibration = CALIBRATION
    ) -> None:
        blobs = BlobStore(documents, VOTE_BLOBS)
        self.points: Mapping[str, DetectionPoint] = {
            kind: DetectionPoint(blobs, kind, calibration, 0, f"of votes by {kind}") for kind in KINDS
        }
        """Calibration of each kind of score."""
        self._scores: Kept[str, Mapping[int, Mapping[str, float]]] = Kept(kept)  # by group id
        self._save_soon = Debounce(SAVE_SECONDS, lambda: self._load(save=True))
        self._load()

    def remember(self, group: GroupKey, scores: Mapping[int, Mapping[str, float]]) -> None:
        """Store the `logprob_scores` of a vote's trajectories, by candidate index, until their rewards come."""
        self._load()
        owner, group_id = group
        self._scores.put(owner, group_id, scores)

    def learn_reward(self, group: GroupKey, index: int, correct: bool) -> None:
        """Learn whether a trajectory is correct."""
        owner, group_id = group
        for kind, score in self._scores.of(owner).get(group_id, {}).get(index, {}).items():
            self.points[kind].add(Label(score, float(correct)))
            self._save_soon.request()

    def _load(self, *, save: bool = False) -> None:
        """Load what a restore has put into the store, and at first what was saved; then save what else was learned."""
        try:
            for point in self.points.values():
                point.reload()
            for point in self.points.values() if save else ():
                point.save()
        except StateError as error:
            logger.warning("the calibration of votes cannot be read or saved: %s", error)


def logprob_scores(sample: Sample) -> dict[str, float]:
    """Compute each kind of score, in [0, 1]; kinds without usable log-probs are left out."""
    scores = {kind: logprob_score(kind, tuple(sample.logprobs or ())) for kind in KINDS}
    return {kind: score for kind, score in scores.items() if score is not None}


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """A vote of ``n`` trajectories of ``prompt``.

    ``sampling``: the engine's sampling parameters by name. ``pattern``: see `policy.voting.create_extractor`.
    ``score``: what weights are computed from; majorities need none.
    """

    prompt: PromptSpec
    n: int
    pattern: str | Sequence[str]
    weights: VoteWeights = "majority"
    score: Score | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the caller requested log-probs."""
        logprobs = self.sampling.get(LOGPROBS)
        return logprobs is not None and logprobs is not False

    @property
    def uses_logprobs(self) -> bool:
        return self.score in KINDS

    @property
    def uses_quality(self) -> bool:
        return self.score == "head" and self.weights != "majority"


@dataclass(slots=True)
class Ballot:
    """A finished trajectory. ``answer``: ``None`` if none was found in it, and then it is not scored either.

    ``score``: what the caller sees. ``vote``: ``None`` until there is a score, and never changed afterwards, so that no
    vote that has decided an election can change later.
    """

    index: int
    sample: Sample
    answer: str | None
    score: float | None = None
    vote: Vote | None = None


class BallotBox(Generic[RequestT, OutputT]):
    """Collects and counts the ballots of one vote. ``calibrate``: returns what a score means for a vote's weight."""

    def __init__(
        self, vote: VoteRequest, run: GroupRun[RequestT, OutputT], calibrate: Callable[[float], float]
    ) -> None:
        self.ballots: list[Ballot] = []
        self._vote, self._run, self._calibrate = vote, run, calibrate
        self._weighting = create_weighting(vote.weights, vote.pattern)

    def is_decided(self, remaining: Sequence[int]) -> bool:
        """Whether the winner cannot change, whatever the candidates ``remaining`` answer.

        A vote without a score could still get any weight, so it counts as remaining. While more votes remain than are
        counted nothing is decided, because all of them could be for one other answer.
        """
        votes, unscored = self._split_votes()
        missing = [*remaining, *(vote.index for vote in unscored)]
        return len(votes) >= len(missing) and is_decided(votes, missing, self._weighting)

    def count(self) -> Tally:
        """Count the votes. Those without a score get the mean score of the others."""
        votes, unscored = self._split_votes()
        mean = fmean(vote.score for vote in votes) if votes else DEFAULT_SCORE
        return count_votes([*votes, *(replace(vote, score=mean) for vote in unscored)], self._weighting)

    def _split_votes(self) -> tuple[list[Vote], list[Vote]]:
        """Return the votes of the ballots that have an answer: those with a score, and those still without."""
        kind, votes, unscored = self._vote.score, [], []
        for ballot in self.ballots:
            if ballot.answer is None:
                continue
            if ballot.vote is None:
                score: float | None = DEFAULT_SCORE
                if self._vote.weights != "majority" and kind is not None:
                    if self._vote.uses_logprobs:
                        score = logprob_scores(ballot.sample).get(kind)
                    else:  # it may come after the candidate's end
                        score = self._run.candidates[ballot.index].quality
                    ballot.score = score
                    score = None if score is None else self._calibrate(score)
                if score is None:
                    unscored.append(Vote(ballot.index, ballot.answer))
                    continue
                ballot.vote = Vote(ballot.index, ballot.answer, score)
            votes.append(ballot.vote)
        return votes, unscored


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The result of a vote. ``ballots``: of the finished trajectories, by candidate index.

    ``sampling``: the sampling parameters in force, without what was added to score the ballots.
    ``decided_early``: whether candidates were stopped because they could not change the answer. ``calibration``:
    ``READY`` or why scores had no effect; ``None`` if no calibration was needed.
    """

    vote_id: str
    request: VoteRequest
    sampling: Mapping[str, object]
    tally: Tally
    ballots: Sequence[Ballot]
    decided_early: bool
    calibration: CalibrationStatus | None
    record: GroupRecord
    seconds: float


class VoteRunner(Generic[RequestT, OutputT]):
    """Runs votes.

    Args:
        confidence: calibrates scores from log-probs.
        vote_ended: is called with the outcome of every vote and the number of candidates that it stopped.
        searches: runs the callers' patterns, outside of the event loop; with one thread, they take one core at most.
        clock: monotonic seconds.
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
        self._rollouts, self._renderer, self._confidence = rollouts, renderer, confidence
        self._vote_ended, self._searches, self._clock = vote_ended, searches, clock

    async def run(self, vote: VoteRequest) -> VoteResult:
        """Sample and count until the answer is certain, then stop the rest. Cancellation stops all candidates.

        Raises:
            InvalidRequest: names the field; nothing was started, unless the pattern takes too long for a trajectory.
            Overloaded, QuotaReached
            EngineError, GroupFailed, GroupAborted: too few candidates could finish.
        """
        self._check(vote)
        sampling = self._renderer.effective_sampling(vote.sampling)
        vote_id = f"vote-{uuid.uuid4().hex}"
        with self._rollouts.admission.admit(vote.n) as ticket:
            extract = create_extractor(vote.pattern)
            more = {LOGPROBS: True} if vote.uses_logprobs and not vote.wants_logprobs else {}
            try:
                request = await self._renderer.make_request(vote.prompt, {**vote.sampling, **more}, vote.n, vote_id)
            except InvalidRequest as error:
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
                return point.calibrator.probability(score) if calibration is CalibrationStatus.READY else DEFAULT_SCORE

            started_at = self._clock()
            async with self._rollouts.gate.enter():
                # Scored by quality, if its votes are weighted by it; as all candidates are needed, none is pruned.
                scored = replace(UNSHAPED, pruning=Pruning(keep_ratio=1.0)) if vote.uses_quality else UNSHAPED
                key, seed = vote.prompt.key or self._renderer.prompt_key(request), self._renderer.tail_seed(request)
                plan, tokens = Plan(POLICY, scored, vote.n), self._renderer.tokens(request)
                spec = GroupSpec(plan, request, vote_id, key, seed, early=True, tokens=tokens)
                run = self._rollouts.collect(spec, ticket=ticket.split(vote.n))
                run.open(InOrder(vote.n), Allocation(vote.n))
                box = BallotBox(vote, run, calibrate)
                early = await self._collect(run, extract, box)
        assert run.record is not None
        tally, ballots = box.count(), sorted(box.ballots, key=lambda ballot: ballot.index)
        scores = {ballot.index: logprob_scores(ballot.sample) for ballot in ballots if ballot.answer is not None}
        self._confidence.remember(run.record.key, scores)
        outcome = VoteOutcome.DECIDED_EARLY if early else VoteOutcome.COUNTED
        self._vote_ended(
            VoteOutcome.NO_ANSWER if tally.winner is None else outcome,
            sum(candidate.reason is DiscardReason.DECIDED for candidate in run.record.candidates),
        )
        seconds = self._clock() - started_at
        return VoteResult(vote_id, vote, sampling, tally, ballots, early, calibration, run.record, seconds)

    def _check(self, vote: VoteRequest) -> None:
        self._rollouts.plan(vote.n, RequestOptions(OFF))  # refuses sizes beyond the limit
        if vote.sampling.get("detokenize") is False:
            raise InvalidRequest("sampling.detokenize", "must not be false: answers are extracted from text")
        if vote.weights != "majority" and vote.score is None:
            raise InvalidRequest(
                "score", f"is required for weights {vote.weights!r}: one of {', '.join(('head', *KINDS))}"
            )
        if vote.uses_quality and not self._rollouts.can_score:
            raise InvalidRequest(
                "score", f"this server does not score quality (see --quality); choose {' or '.join(KINDS)}"
            )

    async def _collect(
        self, run: GroupRun[RequestT, OutputT], extract: Extractor, box: BallotBox[RequestT, OutputT]
    ) -> bool:
        """Collect ballots until all are there, or stop the rest when the vote is decided; return whether it did."""
        loop = asyncio.get_running_loop()
        collected: set[int] = set()
        interval = max(1, len(run.candidates) // MAX_DECISION_CHECKS)
        async with aclosing(run.trajectories()) as trajectories:
            async for trajectory in trajectories:
                collected.add(trajectory.index)
                sample = await self._renderer.to_sample(trajectory.output)
                answer = await loop.run_in_executor(self._searches, find_answer, extract, sample.text)
                box.ballots.append(Ballot(trajectory.index, sample, answer))
                # Others that have finished already count, whether they are needed or not.
                if run.has_ended or not run.deliveries.empty() or len(collected) % interval:
                    continue
                if box.is_decided([c.index for c in run.candidates if c.alive and c.index not in collected]):
                    run.finish_early()
                    return True
        return False


def find_answer(extract: Extractor, text: str) -> str | None:
    """Find the answer in the end of a text.

    Raises:
        InvalidRequest: the pattern took too long.
    """
    deadline, answer = time.thread_time() + SEARCH_SECONDS, None
    for found in extract(text[-TEXT_CHARS:]):
        answer = found
        if time.thread_time() > deadline:
            break
    if time.thread_time() > deadline:
        raise InvalidRequest(
            "pattern",
            f"took more than {SEARCH_SECONDS:g} seconds of processor time to find the answer of one trajectory, and "
            "the vote was ended; use a simpler pattern",
        )
    return answer
