"""Votes of several trajectories of one prompt, which stop early once the remaining ones cannot change the answer."""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Generic, Literal

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import InvalidRequest
from darts_server.observers import VoteObserver
from darts_server.policy.pruning.calibration import CalibrationStatus
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.selection import InOrder
from darts_server.policy.voting import (
    Extractor,
    Tally,
    Vote,
    Weighting,
    count_votes,
    create_extractor,
    create_weighting,
    is_decided,
)
from darts_server.records import GroupRecord
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.rollout.voting.confidence import KINDS, Confidence, logprob_scores
from darts_server.types import OFF, DiscardReason, PromptSpec, RequestOptions, Sample, VoteOutcome, VoteWeights

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


ScoreTrajectory = Callable[[int, Sample], tuple[float | None, float] | None]
"""Scores a trajectory, given its candidate's index: what the caller sees, and what the weight of its vote is computed
from. ``None`` while it has no score."""


class BallotBox:
    """Collects and counts ballots."""

    def __init__(self, weighting: Weighting, score: ScoreTrajectory) -> None:
        self.ballots: list[Ballot] = []
        self._weighting = weighting
        self._score = score

    def is_decided(self, remaining: Sequence[int]) -> bool:
        """Whether the winner cannot change, whatever the candidates ``remaining`` answer.

        A vote without a score could still get any weight, so it counts as remaining. While more votes remain than are
        counted nothing is decided, because all of them could be for one other answer.
        """
        votes, unscored = self._split_votes()
        missing = [*remaining, *(ballot.index for ballot in unscored)]
        return len(votes) >= len(missing) and is_decided(votes, missing, self._weighting)

    def count(self) -> Tally:
        """Count the votes. Those without a score get the mean score of the others."""
        votes, unscored = self._split_votes()
        mean = fmean(vote.score for vote in votes) if votes else DEFAULT_SCORE
        votes += [Vote(ballot.index, ballot.answer, mean) for ballot in unscored if ballot.answer is not None]
        return count_votes(votes, self._weighting)

    def _split_votes(self) -> tuple[list[Vote], list[Ballot]]:
        """Split the ballots that have an answer into votes and ballots that still need a score."""
        votes, unscored = [], []
        for ballot in self.ballots:
            if ballot.answer is None:
                continue
            if ballot.vote is None and (scored := self._score(ballot.index, ballot.sample)) is not None:
                ballot.score, weighed = scored
                ballot.vote = Vote(ballot.index, ballot.answer, weighed)
            if ballot.vote is None:
                unscored.append(ballot)
            else:
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
        observer: is notified of every vote.
        searches: runs the callers' patterns, outside of the event loop; with one thread, they take one core at most.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        confidence: Confidence,
        observer: VoteObserver,
        searches: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._confidence = confidence
        self._observer = observer
        self._searches = searches
        self._clock = clock

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
            request = await self._create_request(vote, vote_id)
            needs_calibration = vote.weights == "log_odds" and vote.uses_logprobs
            calibration = self._confidence.status(vote.score) if vote.score and needs_calibration else None
            started_at = self._clock()
            async with self._rollouts.gate.enter():
                spec = GroupSpec(
                    request=request,
                    group_id=vote_id,
                    policy=POLICY,
                    prompt_key=vote.prompt.key or self._renderer.prompt_key(request),
                    tail_seed=self._renderer.tail_seed(request),
                    early=True,
                    pruning=Pruning() if vote.uses_quality else None,  # scored; as all are needed, none is pruned
                )
                run = self._rollouts.collect(spec, ticket=ticket.split(vote.n))
                run.open(InOrder(vote.n), Allocation(vote.n))
                box = BallotBox(
                    create_weighting(vote.weights, vote.pattern), partial(self._score, vote, run, calibration)
                )
                early = await self._collect(run, extract, box)
        assert run.record is not None
        tally, ballots = box.count(), sorted(box.ballots, key=lambda ballot: ballot.index)
        scores = {ballot.index: logprob_scores(ballot.sample) for ballot in ballots if ballot.answer is not None}
        self._confidence.remember(run.record.key, scores)
        outcome = VoteOutcome.DECIDED_EARLY if early else VoteOutcome.COUNTED
        self._observer.vote_ended(
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

    async def _create_request(self, vote: VoteRequest, vote_id: str) -> RequestT:
        sampling = vote.sampling
        if vote.uses_logprobs and not vote.wants_logprobs:
            sampling = {**sampling, LOGPROBS: True}
        try:
            return await self._renderer.make_request(vote.prompt, sampling, vote.n, vote_id)
        except InvalidRequest as error:
            if error.field in ("text", "token_ids"):
                raise InvalidRequest("prompt", error.message) from error
            raise

    def _score(
        self,
        vote: VoteRequest,
        run: GroupRun[RequestT, OutputT],
        calibration: CalibrationStatus | None,
        index: int,
        sample: Sample,
    ) -> tuple[float | None, float] | None:
        """See `ScoreTrajectory`."""
        if vote.weights == "majority" or vote.score is None:
            return None, DEFAULT_SCORE
        score = logprob_scores(sample).get(vote.score) if vote.uses_logprobs else run.candidates[index].quality
        if score is None or calibration is None:
            return None if score is None else (score, score)
        is_ready = calibration is CalibrationStatus.READY
        return score, self._confidence.probability(vote.score, score) if is_ready else DEFAULT_SCORE

    async def _collect(self, run: GroupRun[RequestT, OutputT], extract: Extractor, box: BallotBox) -> bool:
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
                if run.has_ended or run.has_deliveries:  # others have finished already, and count whether needed or not
                    continue
                if len(collected) % interval:
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
    deadline = time.thread_time() + SEARCH_SECONDS
    answer = None
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
