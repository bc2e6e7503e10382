"""Votes: several trajectories of one prompt, of which the rest is stopped once they cannot change the answer."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic

from darts_server.engine.port import OutputT, Prompter, RequestT
from darts_server.exceptions import InvalidRequest
from darts_server.observers import VoteObserver
from darts_server.policy.pruning.calibration import CalibrationStatus
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.selection.rules import InOrder
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import OFF
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.rollout.voting.ballots import (
    LOG_ODDS,
    MAJORITY,
    UNKNOWN,
    Ballot,
    BallotBox,
    BallotScore,
    ScoreBallot,
    VoteCount,
    extractor_of,
    weighting_of,
)
from darts_server.rollout.voting.confidence import KINDS, Confidence, scores_of
from darts_server.types import DiscardReason, GroupRecord, PromptSpec, RequestOptions, Sample, VoteOutcome

POLICY = "vote"
"""Under which the groups of votes are recorded. They are not shaped."""
HEAD = "head"
LOGPROBS = "logprobs"
LOOKS = 64
"""Times, at most, that it is asked whether a vote is decided. For a thousand trajectories that takes 20 ms and more."""


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """What is put to the vote: ``n`` trajectories of ``prompt``.

    ``sampling``: the engine's sampling parameters by their names. ``pattern``: see `extractor_of`. ``weights``: what a
    vote weighs. ``score``: by which it does, ``head`` or one of `KINDS`; majorities need none.
    """

    prompt: PromptSpec
    n: int
    pattern: str | Sequence[str]
    weights: str = MAJORITY
    score: str | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the caller asked for log-probs."""
        asked = self.sampling.get(LOGPROBS)
        return asked is not None and asked is not False

    @property
    def by_logprobs(self) -> bool:
        return self.score in KINDS

    @property
    def by_quality(self) -> bool:
        return self.score == HEAD and self.weights != MAJORITY

    @property
    def calibrated(self) -> bool:
        """Whether its scores must first be made chances by what was learned from votes."""
        return self.weights == LOG_ODDS and self.by_logprobs


@dataclass(frozen=True, slots=True)
class VoteResult:
    """How a vote ended. ``ballots``: the trajectories that count, by candidate index.

    ``decided_early``: whether candidates were stopped because they could change nothing. ``calibration``: why scores
    told nothing, if they did not; ``None`` where none had to be calibrated.
    """

    vote_id: str
    question: VoteRequest
    count: VoteCount
    ballots: Sequence[Ballot]
    decided_early: bool
    calibration: CalibrationStatus | None
    record: GroupRecord
    seconds: float


class VoteRunner(Generic[RequestT, OutputT]):
    """Holds votes.

    Args:
        confidence: what log-probs are worth.
        observer: hears of every vote.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        prompter: Prompter[RequestT, OutputT],
        confidence: Confidence,
        observer: VoteObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._prompter = prompter
        self._confidence = confidence
        self._observer = observer
        self._clock = clock

    async def run(self, question: VoteRequest) -> VoteResult:
        """Sample, count, and stop what is left when the answer is certain. Being cancelled stops all of it.

        Raises:
            InvalidRequest: names the field; nothing was started.
            Overloaded, QuotaReached
            EngineError, GroupFailed, GroupAborted: too few candidates could finish.
        """
        self._check(question)
        self._rollouts.admission.check(question.n)
        extractor, weighting = extractor_of(question.pattern), weighting_of(question.weights, question.pattern)
        vote_id = f"vote-{uuid.uuid4().hex}"
        request = await self._request(question, vote_id)
        calibration = self._confidence.status(question.score) if question.calibrated and question.score else None
        began = self._clock()
        with self._rollouts.admission.held(question.n) as ticket:
            async with self._rollouts.gate.held():
                run = self._begin(question, request, vote_id)
                ticket.begun()
                poll = BallotBox(extractor, weighting, self._measure(question, run, calibration))
                early = await self._collect(run, poll)
        assert run.record is not None
        count, ballots = poll.count(), sorted(poll.ballots, key=lambda ballot: ballot.index)
        self._confidence.remember(vote_id, {b.index: scores_of(b.sample) for b in ballots if b.answer is not None})
        self._observer.vote_ended(_outcome(count, early), _stopped(run.record))
        return VoteResult(vote_id, question, count, ballots, early, calibration, run.record, self._clock() - began)

    def _check(self, question: VoteRequest) -> None:
        self._rollouts.plan(question.n, RequestOptions(OFF))  # refuses sizes beyond the limit
        if question.sampling.get("detokenize") is False:
            raise InvalidRequest("sampling.detokenize", "answers are found in texts; leave it out")
        if question.weights == MAJORITY:
            return
        if question.score is None:
            raise InvalidRequest(
                "score", f"say by what {question.weights!r} is to weigh: one of {', '.join((HEAD, *KINDS))}"
            )
        if question.score not in (HEAD, *KINDS):
            raise InvalidRequest("score", f"must be one of {', '.join((HEAD, *KINDS))}, got {question.score!r}")
        if question.score == HEAD and not self._rollouts.can_score:
            raise InvalidRequest(
                "score", f"nothing scores quality on this server (see --quality); choose {' or '.join(KINDS)}"
            )

    async def _request(self, question: VoteRequest, vote_id: str) -> RequestT:
        sampling = question.sampling
        if question.by_logprobs and not question.wants_logprobs:
            sampling = {**sampling, LOGPROBS: True}
        try:
            return await self._prompter.request(question.prompt, sampling, question.n, vote_id)
        except InvalidRequest as error:
            if error.field in ("text", "token_ids"):
                raise InvalidRequest("prompt", error.message) from error
            raise

    def _begin(self, question: VoteRequest, request: RequestT, vote_id: str) -> GroupRun[RequestT, OutputT]:
        spec = GroupSpec(
            request,
            vote_id,
            POLICY,
            question.prompt.key or self._prompter.key(request),
            self._prompter.tail_seed(request),
            early=True,
            pruning=Pruning() if question.by_quality else None,  # nobody is pruned, for none can be spared
        )
        run = self._rollouts.collect(spec)
        run.open(InOrder(question.n), Allocation(question.n))
        return run

    def _measure(
        self, question: VoteRequest, run: GroupRun[RequestT, OutputT], calibration: CalibrationStatus | None
    ) -> ScoreBallot | None:
        kind = question.score
        if question.weights == MAJORITY or kind is None:
            return None

        def by_quality(index: int, _: Sample) -> BallotScore | None:
            quality = run.candidates[index].quality
            return None if quality is None else BallotScore(quality, quality)

        def by_logprobs(_: int, sample: Sample) -> BallotScore | None:
            score = scores_of(sample).get(kind)
            return None if score is None else BallotScore(score, chance(score))

        def chance(score: float) -> float:
            if calibration is None:
                return score
            return self._confidence.chance(kind, score) if calibration is CalibrationStatus.READY else UNKNOWN

        return by_logprobs if question.by_logprobs else by_quality

    async def _collect(self, run: GroupRun[RequestT, OutputT], poll: BallotBox) -> bool:
        """Take trajectories until all are there or the rest can be stopped; whether they were."""
        taken: set[int] = set()
        step = max(1, len(run.candidates) // LOOKS)
        async with aclosing(run.trajectories()) as trajectories:
            async for trajectory in trajectories:
                taken.add(trajectory.index)
                await poll.take(trajectory.index, self._prompter.sample(trajectory.output))
                if run.has_ended or run.has_deliveries:  # what has come to its end counts, needed or not
                    continue
                if len(taken) % step:
                    continue
                if poll.decided([c.index for c in run.candidates if c.alive and c.index not in taken]):
                    run.finish_early()
                    return True
        return False


def _stopped(record: GroupRecord) -> int:
    return sum(candidate.reason is DiscardReason.DECIDED for candidate in record.candidates)


def _outcome(count: VoteCount, early: bool) -> VoteOutcome:
    if count.tally.winner is None:
        return VoteOutcome.NO_ANSWER
    return VoteOutcome.DECIDED_EARLY if early else VoteOutcome.COUNTED
