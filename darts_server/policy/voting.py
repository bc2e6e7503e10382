r"""Votes: extract the answers of trajectories, weigh and count them, and decide early.

**Answers** are extracted by a regular expression with one group, from LaTeX's ``\boxed{}``, or by a list of possible
answers: the last match in the text, since a trajectory ends with its answer. White space around an answer is dropped,
and within it counts as one blank; otherwise two answers are equal only if they are written alike (1/2 is not 0.5).

**Weights**: a trajectory votes for its answer; one without an answer has no vote. A vote weighs:

* `MajorityWeighting`: 1.
* `RankWeighting` (ARRoL, test-time use): votes are sorted by score and their ranks mapped linearly to [0, 1], best 1,
  worst 0; equal scores share their mean rank; a single vote weighs 1.
* `LogOddsWeighting`: log(W q / (1 - q)) of the calibrated probability q to be right. If each vote is right with its own
  probability q, and a wrong one is equally likely any of W wrong answers, the heaviest answer is the most probable one
  (naive Bayes). A vote with q below 1 / (W + 1) counts against its own answer.

Weights and their sums are exact fractions, so neither rounding nor the order of adding can decide a vote.

**Decision**: the heaviest answer wins; of equally heavy ones that of the earliest candidate. A vote is decided when the
leader wins whatever the remaining trajectories answer, which is tested with the answers that would hurt it most. The
test is exact: a decided vote cannot turn, and for an undecided one there are answers that turn it.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import re2

from darts_server.exceptions import InvalidRequest
from darts_server.types import VoteWeights

# --- answers ----------------------------------------------------------------

PATTERN_CHARS = 1_000
PATTERN_BYTES = 1 << 17
"""Memory that a compiled expression may take. The largest takes RE2 up to 40 µs for each byte of a text."""
CHOICES = 100
CHOICE_CHARS = 200
BOX = re.compile(r"\\boxed\s*\{")

Extractor = Callable[[str], Iterator[str | None]]
"""Yields what it takes for the answer in a text so far; the last value counts, and without one there is no answer.
Patterns come from callers: whoever iterates can stop between two values when it has taken too long."""


def create_extractor(pattern: str | Sequence[str]) -> Extractor:
    """Create an extractor from a regular expression with one group, ``boxed``, or a list of possible answers.

    Raises:
        InvalidRequest: the pattern cannot be used.
    """
    if pattern == "boxed":
        return _find_boxes
    if not isinstance(pattern, str):
        if not 1 <= len(pattern) <= CHOICES:
            raise InvalidRequest("pattern.choices", f"must be 1 to {CHOICES} answers, got {len(pattern)}")
        for choice in pattern:
            if not 1 <= len(choice.strip()) <= len(choice) <= CHOICE_CHARS:
                raise InvalidRequest(
                    "pattern.choices", f"must have 1 to {CHOICE_CHARS} characters each, got {choice[:50]!r}"
                )
        return partial(_find_choices, pattern)
    if len(pattern) > PATTERN_CHARS:
        raise InvalidRequest(
            "pattern", f"has {len(pattern)} characters, at most {PATTERN_CHARS} are allowed; shorten it"
        )
    # RE2's time for one match is linear in the text and in the compiled expression.
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidRequest(
            "pattern", f"is not accepted by RE2 ({error}), which has no look-around and no back-references"
        ) from error
    if compiled.groups != 1:
        raise InvalidRequest(
            "pattern", f"must have exactly one group, the answer, got {compiled.groups}; write others as (?:...)"
        )
    return partial(_find_matches, compiled)


def _find_matches(compiled: Any, text: str) -> Iterator[str | None]:
    for match in compiled.finditer(text.encode(errors="replace")):
        found = match.group(1)
        yield None if found is None else _normalise(found.decode(errors="replace"))


def _find_boxes(text: str) -> Iterator[str | None]:
    r"""Find the content of the last complete ``\boxed{}``, with inner braces; of nested boxes the innermost."""
    starts = {box.end() for box in BOX.finditer(text)}
    start = end = 0
    opened: list[int] = []
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # braces, and what is escaped
        if found[0] == "{":
            opened.append(found.end())
        elif found[0] == "}" and opened:
            begin = opened.pop()
            if begin in starts and begin > start:
                start, end = begin, found.start()
    yield _normalise(text[start:end])


def _find_choices(choices: Sequence[str], text: str) -> Iterator[str | None]:
    """Find the choice that ends last in the text, outside of longer words; of two the longer."""
    best = (0, 0, "")
    for choice in choices:
        start = text.rfind(choice)
        while start >= 0:
            end = start + len(choice)
            joined_before = start > 0 and text[start - 1].isalnum() and choice[0].isalnum()
            joined_after = end < len(text) and text[end].isalnum() and choice[-1].isalnum()
            if not joined_before and not joined_after:
                best = max(best, (end, len(choice), choice))
                break
            start = text.rfind(choice, 0, end - 1)
        yield _normalise(best[2]) if best[0] else None


def _normalise(answer: str) -> str | None:
    return " ".join(answer.split()) or None


# --- weights ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer of candidate ``index``.

    ``score``: any finite number for `RankWeighting`, the probability q for `LogOddsWeighting`.
    """

    index: int
    answer: str
    score: float = 0.0


AnswerScore = tuple[Fraction, float]
"""Weight of an answer's votes, and minus the index of the earliest candidate that gave it: the greater one wins."""
NO_VOTES: AnswerScore = (Fraction(0), -math.inf)
WorstCases = Iterator[tuple[AnswerScore, AnswerScore]]
"""Leader and rival after the remaining votes that hurt the leader most; several pairs where each may be the worst.

They are computed from the scores of both so far, the number of votes ``cast``, and the indices of the candidates that
have not voted: at least one, ascending.
"""


class MajorityWeighting:
    """Count each vote as 1."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [Fraction(1)] * len(votes)

    def worst_cases(self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]) -> WorstCases:
        yield leader, (rival[0] + len(remaining), max(rival[1], -remaining[0]))


class RankWeighting:
    """Weight votes by the rank of their scores among all votes (ARRoL)."""

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        if len(votes) == 1:
            return [Fraction(1)]
        ordered = sorted(v.score for v in votes)
        return [
            Fraction(bisect_left(ordered, v.score) + bisect_right(ordered, v.score) - 1, 2 * (len(votes) - 1))
            for v in votes
        ]

    def worst_cases(self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]) -> WorstCases:
        """Give all remaining votes to the rival, with the best scores.

        A rank is the number of other votes beaten. With the best scores, a remaining vote beats every vote it is
        compared with, so together they add the number of pairs that contain one. The ranks of the ``cast`` votes do not
        change; their weights do, by a scale that all answers share and that therefore does not matter.
        """
        r, scale = len(remaining), max(cast - 1, 0)
        pairs = r * cast + Fraction(r * (r - 1), 2)
        yield (leader[0] * scale, leader[1]), (rival[0] * scale + pairs, max(rival[1], -remaining[0]))


@dataclass(frozen=True, slots=True)
class LogOddsWeighting:
    """Weight votes by the log-odds of being right.

    ``wrong_answers``: W; 1 for questions with two answers, where the weight is the plain log-odds. ``min_chance``,
    ``max_chance``: q is clipped to these, so that no single vote decides alone.
    """

    wrong_answers: int = 10
    min_chance: float = 0.01
    max_chance: float = 0.99

    def weights(self, votes: Sequence[Vote]) -> list[Fraction]:
        return [self.weight(v.score) for v in votes]

    def weight(self, chance: float) -> Fraction:
        """Compute the weight of a vote that is right with this probability."""
        q = min(max(chance, self.min_chance), self.max_chance)
        return Fraction(math.log(self.wrong_answers * q / (1 - q)))

    def worst_cases(self, leader: AnswerScore, rival: AnswerScore, cast: int, remaining: Sequence[int]) -> WorstCases:
        """Give all remaining votes to the rival, with the highest q; or to the leader, with the lowest.

        Votes with the lowest q count against the answer they are for, so the leader can be hurt by votes for it. If no
        other answer has a vote yet, one of them must still be for a rival: an answer can win only with a vote.
        """
        r, gain, loss = len(remaining), self.weight(self.max_chance), min(self.weight(self.min_chance), Fraction(0))
        yield leader, (rival[0] + r * gain, max(rival[1], -remaining[0]))
        if rival is NO_VOTES:
            yield (leader[0] + (r - 1) * loss, leader[1]), (gain, -remaining[0])
        else:
            yield (leader[0] + r * loss, max(leader[1], -remaining[0])), rival


Weighting = MajorityWeighting | RankWeighting | LogOddsWeighting


def create_weighting(weights: VoteWeights, pattern: str | Sequence[str]) -> Weighting:
    """Create a weighting by its name. If the pattern lists the possible answers, all but one of them are wrong."""
    if weights == "majority":
        return MajorityWeighting()
    if weights == "rank":
        return RankWeighting()
    return LogOddsWeighting() if isinstance(pattern, str) else LogOddsWeighting(max(1, len(pattern) - 1))


# --- counting ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """Result of a vote.

    ``winner``: ``None`` without votes. ``weights``: of each answer, heaviest first. ``votes``: how many each answer
    has. ``vote_weights``: of each vote, by candidate index.
    """

    winner: str | None
    weights: Mapping[str, float]
    votes: Mapping[str, int]
    vote_weights: Mapping[int, float]


def count_votes(votes: Sequence[Vote], weighting: Weighting) -> Tally:
    """Count the votes, in any order; each candidate has one at most."""
    scores = _score_answers(votes, weighting)
    return Tally(
        winner=next(iter(scores), None),
        weights={answer: float(weight) for answer, (weight, _) in scores.items()},
        votes={answer: sum(v.answer == answer for v in votes) for answer in scores},
        vote_weights={v.index: float(w) for v, w in zip(votes, weighting.weights(votes), strict=True)},
    )


def is_decided(votes: Sequence[Vote], remaining: Sequence[int], weighting: Weighting) -> bool:
    """Return whether the winner among ``votes`` wins whatever else is answered.

    ``remaining``: indices of the candidates that may still vote.
    """
    if not remaining:
        return True
    if not votes:
        return False
    leader, *rivals = _score_answers(votes, weighting).values()
    return not any(
        rival_after > leader_after
        for rival in (NO_VOTES, *rivals)
        for leader_after, rival_after in weighting.worst_cases(leader, rival, len(votes), sorted(remaining))
    )


def _score_answers(votes: Sequence[Vote], weighting: Weighting) -> dict[str, AnswerScore]:
    """Return the score of each answer, the winner's first."""
    scores: dict[str, AnswerScore] = {}
    for vote, weight in zip(votes, weighting.weights(votes), strict=True):
        weight_before, first = scores.get(vote.answer, NO_VOTES)
        scores[vote.answer] = weight_before + weight, max(first, -vote.index)
    return dict(sorted(scores.items(), key=lambda item: item[1], reverse=True))
