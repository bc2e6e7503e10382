"""Problems of the tiny task, running-digit arithmetic, and its verifier. One character is one token.

A prompt ``7a-5b*4>`` is a start digit and n steps. A step is a letter, an operator and a digit. The letters are in
alphabetical order, which makes copying easy to learn. All arithmetic is modulo 10, from left to right.
An answer ends with ``#`` and the resulting digit.

A looped problem ``7@9a-5b*3c-8d+7>`` applies its steps nine times. Each round begins with a step that adds the number
of rounds that are left: ``@+9=6a-5=1b*3=3c-8=5d+7=2@+8=0a-5=5…``. So a short prompt needs a long answer. Its factors
are 1, 3, 7 and 9 only, which have an inverse, so that no step makes earlier steps irrelevant. The number that is added
changes, so the rounds have no period: an answer that stops early, after any number of rounds, is right in less than a
fifth of all cases, and a guess in a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Difficulty = Literal["easy", "hard", "looped"]
Operator = Literal["+", "-", "*"]

DIGITS = "0123456789"
LETTERS = "abcdefghi"
OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
PROMPT_END = ">"
EQUALS = "="
RECHECK = "?"
ANSWER = "#"
LOOP = "@"
# The order determines the token ids of models that are trained already: append only.
ALPHABET = DIGITS + LETTERS + "".join(OPERATORS) + EQUALS + ANSWER + RECHECK + PROMPT_END + LOOP

# Drawn uniformly: 4 stands twice, so that easy chains are a little longer on average.
STEP_COUNTS: dict[Difficulty, tuple[int, ...]] = {"easy": (2, 3, 4, 4), "hard": (6, 7, 8, 9), "looped": (4,)}
ROUNDS = (8, 9)
# Factors that have an inverse modulo 10.
INVERTIBLE = (1, 3, 7, 9)

MAX_PROMPT_TOKENS = 29
"""A start digit, 9 steps of 3 characters and ``>``."""
MAX_RESPONSE_TOKENS = 256


@dataclass(frozen=True)
class Step:
    letter: str
    operator: Operator
    digit: int

    def apply(self, value: int) -> int:
        """Return the running digit (0 to 9) after this step."""
        return {"+": value + self.digit, "-": value - self.digit, "*": value * self.digit}[self.operator] % 10


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer. ``chain``: all steps of a worked answer."""

    prompt: str
    chain: tuple[Step, ...]
    answer: int
    difficulty: Difficulty


def sample_problem(rng: Random, difficulty: Difficulty | None = None) -> Problem:
    """Draw a problem of the given difficulty, or an easy or a hard problem with equal probability."""
    if difficulty is None:
        difficulty = "easy" if rng.random() < 0.5 else "hard"
    is_looped = difficulty == "looped"
    start = rng.randrange(10)
    steps = []
    for letter in LETTERS[: rng.choice(STEP_COUNTS[difficulty])]:
        operator = rng.choice(OPERATORS)
        digit = rng.choice(INVERTIBLE) if is_looped and operator == "*" else rng.randrange(10)
        steps.append(Step(letter, operator, digit))

    chain = steps
    loop = ""
    if is_looped:
        rounds = rng.choice(ROUNDS)
        loop = f"{LOOP}{rounds}"
        chain = []
        for rounds_left in range(rounds, 0, -1):
            chain += [Step(LOOP, "+", rounds_left), *steps]
    answer = start
    for step in chain:
        answer = step.apply(answer)
    body = "".join(f"{step.letter}{step.operator}{step.digit}" for step in steps)
    return Problem(f"{start}{loop}{body}{PROMPT_END}", tuple(chain), answer, difficulty)


def reward(problem: Problem, response_text: str) -> float:
    """Return 1.0 if exactly the right digit follows the last ``#``, else 0.0."""
    _, mark, answer = response_text.rpartition(ANSWER)
    return float(mark == ANSWER and answer == str(problem.answer))
