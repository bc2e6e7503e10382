"""The ballots of one vote while it runs: answers, their scores, and whether the rest of the trajectories is needed."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from darts_server.exceptions import InvalidRequest
from darts_server.policy.voting.tally import Tally, count_votes, is_decided
from darts_server.policy.voting.weighting import LogOddsWeighting, MajorityWeighting, RankWeighting, Vote, Weighting
from darts_server.types import Sample

MAJORITY, RANK, LOG_ODDS = WEIGHTS = ("majority", "rank", "log_odds")
DEFAULT_SCORE = 0.5
"""Of all votes if none has a score: equal scores give equal weights."""


@dataclass(frozen=True, slots=True)
class BallotScore:
    """``value``: the score that the caller sees. ``probability``: what the weight of the vote is computed from; equal
    to ``value`` where only ranks count.
    """

    value: float
    probability: float


FindAnswer = Callable[[str], Awaitable[str | None]]
"""Finds the answer in a text; ``None`` if there is none."""
ScoreBallot = Callable[[int, Sample], BallotScore | None]
"""Scores a trajectory, given its candidate's index; ``None`` while it has no score."""


@dataclass(slots=True)
class Ballot:
    """A finished trajectory. ``answer``: ``None`` if none was found in it, and then it is not scored either."""

    index: int
    sample: Sample
    answer: str | None
    score: BallotScore | None = None


@dataclass(frozen=True, slots=True)
class VoteCount:
    """The result of counting. ``weights``: of each vote, by candidate index."""

    tally: Tally
    weights: dict[int, float]


class BallotBox:
    """Collects and counts ballots.

    ``score_ballot``: ``None`` if all votes weigh the same. Once a ballot has a score it keeps it, so that no vote that
    has decided an election can change later.
    """

    def __init__(self, find_answer: FindAnswer, weighting: Weighting, score_ballot: ScoreBallot | None) -> None:
        self.ballots: list[Ballot] = []
        self._find_answer = find_answer
        self._weighting = weighting
        self._score_ballot = score_ballot

    async def add(self, index: int, sample: Sample) -> None:
        """Extract the answer of a finished trajectory, and add its ballot."""
        self.ballots.append(Ballot(index, sample, await self._find_answer(sample.text)))

    def is_decided(self, remaining: Sequence[int]) -> bool:
        """Whether the winner cannot change, whatever the candidates ``remaining`` answer.

        A vote without a score could still get any weight, so it counts as remaining. While more votes remain than are
        counted nothing is decided, because all of them could be for one other answer.
        """
        votes, unscored = self._split_votes()
        missing = [*remaining, *(ballot.index for ballot in unscored)]
        return len(votes) >= len(missing) and is_decided(votes, missing, self._weighting)

    def count(self) -> VoteCount:
        """Count the votes. Those without a score get the mean score of the others."""
        scored, unscored = self._split_votes()
        mean = fmean(vote.score for vote in scored) if scored else DEFAULT_SCORE
        votes = [*scored, *(Vote(b.index, b.answer, mean) for b in unscored if b.answer is not None)]
        weights = self._weighting.weights(votes)
        return VoteCount(
            tally=count_votes(votes, self._weighting),
            weights={vote.index: float(weight) for vote, weight in zip(votes, weights, strict=True)},
        )

    def _split_votes(self) -> tuple[list[Vote], list[Ballot]]:
        """Split the ballots that have an answer into votes and ballots that still need a score."""
        votes, unscored = [], []
        for ballot in self.ballots:
            if ballot.answer is None:
                continue
            if self._score_ballot is None:
                votes.append(Vote(ballot.index, ballot.answer))
                continue
            ballot.score = ballot.score or self._score_ballot(ballot.index, ballot.sample)
            if ballot.score is None:
                unscored.append(ballot)
            else:
                votes.append(Vote(ballot.index, ballot.answer, ballot.score.probability))
        return votes, unscored


def create_weighting(weights: str, pattern: str | Sequence[str]) -> Weighting:
    """Create a weighting by its name. If the pattern lists the possible answers, all but one of them are wrong.

    Raises:
        InvalidRequest: there is no such weighting.
    """
    if weights == MAJORITY:
        return MajorityWeighting()
    if weights == RANK:
        return RankWeighting()
    if weights == LOG_ODDS:
        if isinstance(pattern, str):
            return LogOddsWeighting()
        return LogOddsWeighting(wrong_answers=max(1, len(pattern) - 1))
    raise InvalidRequest("weights", f"must be one of {', '.join(WEIGHTS)}, got {weights!r}")
