"""One vote while it runs: the trajectories that came so far, what they answer, and whether the rest is needed."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from darts_server.exceptions import InvalidRequest
from darts_server.policy.voting.answers import BoxedExtractor, ChoiceExtractor, Extractor, RegexExtractor
from darts_server.policy.voting.tally import Tally, count_votes, is_decided
from darts_server.policy.voting.weighting import LogOddsWeighting, MajorityWeighting, RankWeighting, Vote, Weighting
from darts_server.types import Sample

BOXED = "boxed"
MAJORITY, RANK, LOG_ODDS = WEIGHTS = ("majority", "rank", "log_odds")
UNKNOWN = 0.5
"""The score of all votes where none has one: they weigh the same then."""
SHORT_TEXT = 2048
"""Characters that are searched in some milliseconds, whatever the pattern. Longer texts are searched in a thread."""


@dataclass(frozen=True, slots=True)
class BallotScore:
    """``value``: the score that the caller sees. ``probability``: the weight is computed from it; equal to ``value``
    where only ranks count.
    """

    value: float
    probability: float


ScoreBallot = Callable[[int, Sample], BallotScore | None]
"""What a trajectory, by its candidate's index, is worth; ``None`` while that is not known."""


@dataclass(slots=True)
class Ballot:
    """A trajectory that counts. ``answer``: ``None`` if there is none in it. ``measured``: of those with an answer."""

    index: int
    sample: Sample
    answer: str | None
    score: BallotScore | None = None


@dataclass(frozen=True, slots=True)
class VoteCount:
    """How a vote ended. ``weights``: what each vote weighs, by candidate index."""

    tally: Tally
    weights: dict[int, float]


class BallotBox:
    """Takes trajectories and counts them.

    ``measure``: ``None`` where votes weigh the same. A score that was once known stays, so that no vote that counted
    for a decision changes after it.
    """

    def __init__(self, extractor: Extractor, weighting: Weighting, measure: ScoreBallot | None) -> None:
        self.ballots: list[Ballot] = []
        self._extractor = extractor
        self._weighting = weighting
        self._measure = measure

    async def take(self, index: int, sample: Sample) -> None:
        """A trajectory came to its end."""
        find = self._extractor.extract
        short = len(sample.text) <= SHORT_TEXT
        answer = find(sample.text) if short else await asyncio.to_thread(find, sample.text)
        self.ballots.append(Ballot(index, sample, answer))

    def decided(self, remaining: Sequence[int]) -> bool:
        """Whether the winner stays the winner whatever the candidates ``remaining`` answer.

        A vote whose score is not known may yet weigh anything, so it counts with those that remain. Nothing is decided
        by fewer votes than are missing: then all of these can be for another answer.
        """
        known, unknown = self._votes()
        missing = [*remaining, *(ballot.index for ballot in unknown)]
        return len(known) >= len(missing) and is_decided(known, missing, self._weighting)

    def count(self) -> VoteCount:
        """The result. Votes without a score get the mean of the others'."""
        known, unknown = self._votes()
        mean = fmean(vote.score for vote in known) if known else UNKNOWN
        votes = [*known, *(Vote(b.index, b.answer, mean) for b in unknown if b.answer is not None)]
        weights = self._weighting.weights(votes)
        return VoteCount(
            tally=count_votes(votes, self._weighting),
            weights={vote.index: float(weight) for vote, weight in zip(votes, weights, strict=True)},
        )

    def _votes(self) -> tuple[list[Vote], list[Ballot]]:
        """Votes that weigh what they will weigh, and ballots with an answer whose score is not known."""
        known, unknown = [], []
        for ballot in self.ballots:
            if ballot.answer is None:
                continue
            if self._measure is None:
                known.append(Vote(ballot.index, ballot.answer))
                continue
            ballot.score = ballot.score or self._measure(ballot.index, ballot.sample)
            if ballot.score is None:
                unknown.append(ballot)
            else:
                known.append(Vote(ballot.index, ballot.answer, ballot.score.probability))
        return known, unknown


def extractor_of(pattern: str | Sequence[str]) -> Extractor:
    """What finds answers: a regular expression with one group, ``boxed``, or a list of the answers there may be.

    Raises:
        InvalidRequest: it cannot be used.
    """
    if isinstance(pattern, str):
        return BoxedExtractor() if pattern == BOXED else RegexExtractor(pattern)
    try:
        return ChoiceExtractor(tuple(pattern))
    except InvalidRequest as error:
        raise InvalidRequest("pattern.choices", error.message) from error


def weighting_of(weights: str, pattern: str | Sequence[str]) -> Weighting:
    """What votes weigh, by its name. Where the possible answers are listed, all but one of them are wrong.

    Raises:
        InvalidRequest: there is no such weighting.
    """
    if weights == MAJORITY:
        return MajorityWeighting()
    if weights == RANK:
        return RankWeighting()
    if weights == LOG_ODDS:
        return (
            LogOddsWeighting() if isinstance(pattern, str) else LogOddsWeighting(wrong_answers=max(1, len(pattern) - 1))
        )
    raise InvalidRequest("weights", f"must be one of {', '.join(WEIGHTS)}, got {weights!r}")
