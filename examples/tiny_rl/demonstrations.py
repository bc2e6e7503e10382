"""Demonstrations, which the tiny policy learns from.

A worked answer ``a-5=2b*4=8#8`` writes every step with its result, then ``#`` and the digit. A re-check is ``?`` and
the whole chain again. A guess is ``#`` and a digit without a chain.

Nothing here keeps state: every random choice comes from the caller's generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from darts_server.offline.demo.problems import ANSWER, EQUALS, MAX_RESPONSE_TOKENS, RECHECK, Difficulty, Problem


@dataclass(frozen=True)
class Habits:
    """How demonstrations of one difficulty are written, as probabilities."""

    guess: float = 0.0  # no chain at all
    ramble: float = 0.0  # a first re-check follows the direct chain
    loop: float = 0.0  # another re-check follows a re-check
    direct_error: float = 0.0  # a step of the direct chain has a wrong result
    recheck_error: float = 0.0  # a step of a re-check has a wrong result


@dataclass(frozen=True)
class Verbosity:
    """Habits for each difficulty."""

    easy: Habits
    hard: Habits
    looped: Habits = Habits()

    def of(self, difficulty: Difficulty) -> Habits:
        """Return the habits for one difficulty."""
        return {"easy": self.easy, "hard": self.hard, "looped": self.looped}[difficulty]


CLEAN = Verbosity(easy=Habits(), hard=Habits())
"""Direct chains without an error: what the curriculum teaches first."""

STANDARD = Verbosity(
    easy=Habits(guess=0.0, ramble=0.35, loop=0.78, direct_error=0.08, recheck_error=0.22),
    hard=Habits(guess=0.55, ramble=0.15, loop=0.60, direct_error=0.03, recheck_error=0.06),
)
"""Easy: rambling hurts, right answers are short. Hard: depth helps, they are long."""

WORDIER = Verbosity(
    easy=Habits(guess=0.0, ramble=0.40, loop=0.78, direct_error=0.08, recheck_error=0.08),
    hard=Habits(guess=0.38, ramble=0.30, loop=0.60, direct_error=0.03, recheck_error=0.03),
)
"""More re-checks, no worse than direct chains: being long is not being wrong."""

DEEP = Verbosity(
    easy=Habits(guess=0.0, ramble=0.35, loop=0.78, direct_error=0.08, recheck_error=0.02),
    hard=Habits(guess=0.55, ramble=0.50, loop=0.30, direct_error=0.10, recheck_error=0.01),
)
"""For hard problems alone: guesses are short and wrong, direct chains often wrong, re-checks nearly always right."""

MIXED = Verbosity(
    easy=WORDIER.easy,
    hard=Habits(),
    looped=Habits(guess=0.25, ramble=0.10, direct_error=0.005),
)
"""For easy and looped problems. Looped ones: guesses are wrong, chains have some 40 steps and are right four times in
five, and a re-check never fits."""


@dataclass(frozen=True)
class Variant:
    """Demonstrations of a warm start: how they are written, and of which difficulties, in turns (None: easy or hard).

    ``steps``: how many the warm start needs.
    """

    verbosity: Verbosity
    difficulties: tuple[Difficulty | None, ...] = (None,)
    steps: int = 700


VARIANTS: dict[str, Variant] = {
    "standard": Variant(STANDARD),
    "wordier": Variant(WORDIER),
    "deep": Variant(DEEP),
    # Far more looped ones than the policy is trained on: it has to learn them from a few hundred steps.
    "mixed": Variant(MIXED, ("looped", "easy", "easy", "easy"), steps=900),
}


def demonstration(problem: Problem, rng: Random, verbosity: Verbosity = CLEAN) -> str:
    """Write one answer to the problem, without the end of sequence.

    The final digit is the result of the last chain. No chain starts beyond
    MAX_RESPONSE_TOKENS characters, but the text may be longer: training cuts it there.
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
    """Write all steps once, each wrong with probability ``error``, carried on."""
    value = int(problem.prompt[0])
    parts: list[str] = []
    for step in problem.chain:
        value = step.apply(value)
        if rng.random() < error:
            value = (value + rng.randrange(1, 10)) % 10
        parts.append(f"{step.letter}{step.operator}{step.digit}{EQUALS}{value}")
    return "".join(parts), value
