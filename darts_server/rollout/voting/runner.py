"""Votes of several trajectories of one prompt, which stop early once the remaining ones cannot change the answer."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import InvalidRequest
from darts_server.observers import VoteObserver
from darts_server.policy.pruning.calibration import CalibrationStatus
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.selection import InOrder
from darts_server.records import GroupRecord
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.rollout.voting.answer_search import AnswerFinder
from darts_server.rollout.voting.ballots import (
    DEFAULT_SCORE,
    LOG_ODDS,
    MAJORITY,
    Ballot,
    BallotBox,
    BallotScore,
    ScoreBallot,
    VoteCount,
    create_weighting,
)
from darts_server.rollout.voting.confidence import KINDS, Confidence, logprob_scores
from darts_server.serving.admission import Ticket
from darts_server.types import OFF, DiscardReason, PromptSpec, RequestOptions, Sample, VoteOutcome

POLICY = "vote"
"""Under this name the groups of votes are recorded. They are not shaped."""
HEAD = "head"
LOGPROBS = "logprobs"
MAX_DECISION_CHECKS = 64
"""Per vote. With a thousand trajectories one check takes 20 ms or more."""


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """A vote of ``n`` trajectories of ``prompt``.

    ``sampling``: the engine's sampling parameters by name. ``pattern``: see `policy.voting.answers.create_extractor`.
    ``weights``: one of `WEIGHTS`. ``score``: what weights are computed from, ``head`` or one of `KINDS`; majorities
    need none.
    """

    prompt: PromptSpec
    n: int
    pattern: str | Sequence[str]
    weights: str = MAJORITY
    score: str | None = None
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
        return self.score == HEAD and self.weights != MAJORITY

    @property
    def needs_calibration(self) -> bool:
        """Whether its scores must be turned into probabilities by the rewards of earlier votes."""
        return self.weights == LOG_ODDS and self.uses_logprobs


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
    count: VoteCount
    ballots: Sequence[Ballot]
    decided_early: bool
    calibration: CalibrationStatus | None
    record: GroupRecord
    seconds: float


class VoteRunner(Generic[RequestT, OutputT]):
    """Runs votes.

    Args:
        confidence: calibrates scores from log-probs.
        finder: finds the answers of trajectories.
        observer: is notified of every vote.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        confidence: Confidence,
        finder: AnswerFinder,
        observer: VoteObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._confidence = confidence
        self._finder = finder
        self._observer = observer
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
            await self._finder.check(vote.pattern)
            weighting = create_weighting(vote.weights, vote.pattern)
            request = await self._create_request(vote, vote_id)
            calibration = self._confidence.status(vote.score) if vote.needs_calibration and vote.score else None
            started_at = self._clock()
            async with self._rollouts.gate.enter():
                run = self._start_group(vote, request, vote_id, ticket.split(vote.n))
                box = BallotBox(
                    partial(self._finder.find, vote.pattern), weighting, self._score_ballot(vote, run, calibration)
                )
                early = await self._collect(run, box)
        assert run.record is not None
        count, ballots = box.count(), sorted(box.ballots, key=lambda ballot: ballot.index)
        scores = {ballot.index: logprob_scores(ballot.sample) for ballot in ballots if ballot.answer is not None}
        self._confidence.remember(run.record.key, scores)
        self._observer.vote_ended(_outcome(count, early), _count_stopped(run.record))
        seconds = self._clock() - started_at
        return VoteResult(vote_id, vote, sampling, count, ballots, early, calibration, run.record, seconds)

    def _check(self, vote: VoteRequest) -> None:
        self._rollouts.plan(vote.n, RequestOptions(OFF))  # refuses sizes beyond the limit
        if vote.sampling.get("detokenize") is False:
            raise InvalidRequest("sampling.detokenize", "must not be false: answers are extracted from text")
        if vote.weights == MAJORITY:
            return
        kinds = ", ".join((HEAD, *KINDS))
        if vote.score is None:
            raise InvalidRequest("score", f"is required for weights {vote.weights!r}: one of {kinds}")
        if vote.score not in (HEAD, *KINDS):
            raise InvalidRequest("score", f"must be one of {kinds}, got {vote.score!r}")
        if vote.score == HEAD and not self._rollouts.can_score:
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

    def _start_group(
        self, vote: VoteRequest, request: RequestT, vote_id: str, ticket: Ticket
    ) -> GroupRun[RequestT, OutputT]:
        spec = GroupSpec(
            request=request,
            group_id=vote_id,
            policy=POLICY,
            prompt_key=vote.prompt.key or self._renderer.prompt_key(request),
            tail_seed=self._renderer.tail_seed(request),
            early=True,
            pruning=Pruning() if vote.uses_quality else None,  # a group that needs all its candidates prunes none
        )
        run = self._rollouts.collect(spec, ticket=ticket)
        run.open(InOrder(vote.n), Allocation(vote.n))
        return run

    def _score_ballot(
        self, vote: VoteRequest, run: GroupRun[RequestT, OutputT], calibration: CalibrationStatus | None
    ) -> ScoreBallot | None:
        kind = vote.score
        if vote.weights == MAJORITY or kind is None:
            return None

        def by_quality(index: int, _: Sample) -> BallotScore | None:
            quality = run.candidates[index].quality
            return None if quality is None else BallotScore(quality, quality)

        def by_logprobs(_: int, sample: Sample) -> BallotScore | None:
            score = logprob_scores(sample).get(kind)
            return None if score is None else BallotScore(score, probability(score))

        def probability(score: float) -> float:
            if calibration is None:
                return score
            is_ready = calibration is CalibrationStatus.READY
            return self._confidence.probability(kind, score) if is_ready else DEFAULT_SCORE

        return by_logprobs if vote.uses_logprobs else by_quality

    async def _collect(self, run: GroupRun[RequestT, OutputT], box: BallotBox) -> bool:
        """Collect ballots until all are there, or stop the rest when the vote is decided; return whether it did."""
        collected: set[int] = set()
        interval = max(1, len(run.candidates) // MAX_DECISION_CHECKS)
        async with aclosing(run.trajectories()) as trajectories:
            async for trajectory in trajectories:
                collected.add(trajectory.index)
                await box.add(trajectory.index, await self._renderer.to_sample(trajectory.output))
                if run.has_ended or run.has_deliveries:  # others have finished already, and count whether needed or not
                    continue
                if len(collected) % interval:
                    continue
                if box.is_decided([c.index for c in run.candidates if c.alive and c.index not in collected]):
                    run.finish_early()
                    return True
        return False


def _count_stopped(record: GroupRecord) -> int:
    return sum(candidate.reason is DiscardReason.DECIDED for candidate in record.candidates)


def _outcome(count: VoteCount, early: bool) -> VoteOutcome:
    if count.tally.winner is None:
        return VoteOutcome.NO_ANSWER
    return VoteOutcome.DECIDED_EARLY if early else VoteOutcome.COUNTED
