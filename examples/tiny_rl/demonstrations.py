"""Demonstrations from which the tiny policy learns.

A worked answer ``a-5=2b*4=8#8`` writes every step with its result, then ``#`` and the digit. A re-check is ``?`` and
the whole chain again. A guess is ``#`` and a digit without a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from darts_server.offline.demo.problems import ANSWER, EQUALS, MAX_RESPONSE_TOKENS, RECHECK, Difficulty, Problem


@dataclass(frozen=True)
class Habits:
    """Probabilities by which demonstrations of one difficulty are written."""

    guess: float = 0.0
    """A guess without a chain."""
    ramble: float = 0.0
    """A first re-check follows the direct chain."""
    loop: float = 0.0
    """Another re-check follows a re-check."""
    direct_error: float = 0.0
    """A step of the direct chain has a wrong result."""
    recheck_error: float = 0.0
    """A step of a re-check has a wrong result."""


@dataclass(frozen=True)
class Verbosity:
    """Habits for each difficulty."""

    easy: Habits
    hard: Habits
    looped: Habits = Habits()

    def of(self, difficulty: Difficulty) -> Habits:
        return {"easy": self.easy, "hard": self.hard, "looped": self.looped}[difficulty]


CLEAN = Verbosity(easy=Habits(), hard=Habits())
"""Direct chains without an error. The curriculum teaches them first."""

STANDARD = Verbosity(
    easy=Habits(guess=0.0, ramble=0.35, loop=0.78, direct_error=0.08, recheck_error=0.22),
    hard=Habits(guess=0.55, ramble=0.15, loop=0.60, direct_error=0.03, recheck_error=0.06),
)
"""On easy problems rambling hurts, and correct answers are short. On hard problems depth helps, and they are long."""

WORDIER = Verbosity(
    easy=Habits(guess=0.0, ramble=0.40, loop=0.78, direct_error=0.08, recheck_error=0.08),
    hard=Habits(guess=0.38, ramble=0.30, loop=0.60, direct_error=0.03, recheck_error=0.03),
)
"""More re-checks, which are no worse than direct chains, so that a long answer is not a wrong answer."""

DEEP = Verbosity(
    easy=Habits(guess=0.0, ramble=0.35, loop=0.78, direct_error=0.08, recheck_error=0.02),
    hard=Habits(guess=0.55, ramble=0.50, loop=0.30, direct_error=0.10, recheck_error=0.01),
)
"""For hard problems: guesses are short and wrong, direct chains often wrong, re-checks nearly always correct."""

MIXED = Verbosity(
    easy=WORDIER.easy,
    hard=Habits(),
    looped=Habits(guess=0.25, ramble=0.10, direct_error=0.005),
)
"""For easy and looped problems. On looped problems guesses are wrong, chains have some 40 steps and are correct four
times in five, and a re-check never fits."""


@dataclass(frozen=True)
class Variant:
    """Demonstrations of a warm start."""

    verbosity: Verbosity
    difficulties: tuple[Difficulty | None, ...] = (None,)
    """Difficulties of the problems, in turns. None is easy or hard."""
    steps: int = 700
    """Number of steps that the warm start needs."""


VARIANTS: dict[str, Variant] = {
    "standard": Variant(STANDARD),
    "wordier": Variant(WORDIER),
    "deep": Variant(DEEP),
    # More looped problems than in training, because the policy has to learn them in a few hundred steps.
    "mixed": Variant(MIXED, ("looped", "easy", "easy", "easy"), steps=900),
}


def demonstration(problem: Problem, rng: Random, verbosity: Verbosity = CLEAN) -> str:
    """Write one answer to the problem, without the end of sequence.

    No chain starts beyond MAX_RESPONSE_TOKENS characters, but the text may be longer. Training cuts it there.
    """
    habits = verbosity.of(problem.difficulty)
    if rng.random() < habits.guess:
        return f"{ANSWER}{rng.randrange(10)}"
    text, result = _chain(problem, rng, habits.direct_error)
    goes_on = habits.ramble
    while len(text) < MAX_RESPONSE_TOKENS and rng.random() < goes_on:
        again, result = _chain(problem, rng, habits.recheck_error)
        text += RECHECK + again
        goes_on = habits.loop
    return f"{text}{ANSWER}{result}"


def _chain(problem: Problem, rng: Random, error: float) -> tuple[str, int]:
    """Write all steps once. Each is wrong with probability ``error``, and later steps use its result."""
    value = int(problem.prompt[0])
    parts: list[str] = []
    for step in problem.chain:
        value = step.apply(value)
        if rng.random() < error:
            value = (value + rng.randrange(1, 10)) % 10
        parts.append(f"{step.letter}{step.operator}{step.digit}{EQUALS}{value}")
    return "".join(parts), value
