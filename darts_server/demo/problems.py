"""Problems of the tiny task, running-digit arithmetic, and its verifier. One character is one token.

A prompt ``7a-5b*4>`` is a start digit and n steps; a step is a letter, an operator and a digit. The letters come in
alphabetical order: they are anchors that make copying easy to learn. All arithmetic is modulo 10, from left to right.
An answer ends with ``#`` and the resulting digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Difficulty = Literal["easy", "hard"]
Operator = Literal["+", "-", "*"]

DIGITS = "0123456789"
LETTERS = "abcdefghi"
OPERATORS: tuple[Operator, ...] = ("+", "-", "*")
PROMPT_END, EQUALS, RECHECK, ANSWER = ">", "=", "?", "#"
ALPHABET = DIGITS + LETTERS + "".join(OPERATORS) + EQUALS + ANSWER + RECHECK + PROMPT_END

# Drawn uniformly: 4 stands twice, so that easy chains are a little longer on average.
STEP_COUNTS: dict[Difficulty, tuple[int, ...]] = {
    "easy": (2, 3, 4, 4),
    "hard": (6, 7, 8, 9),
}

MAX_PROMPT_TOKENS = 29  # start digit + 9 steps of 3 characters + ">"
MAX_RESPONSE_TOKENS = 256


@dataclass(frozen=True)
class Step:
    """One operation on the running digit."""

    operator: Operator
    digit: int

    def apply(self, value: int) -> int:
        """Return the running digit (0 to 9) after this step."""
        match self.operator:
            case "+":
                return (value + self.digit) % 10
            case "-":
                return (value - self.digit) % 10
            case "*":
                return (value * self.digit) % 10


@dataclass(frozen=True)
class Problem:
    """One prompt with what is needed to write and to check answers to it."""

    prompt: str
    steps: tuple[Step, ...]
    answer: int
    difficulty: Difficulty

    @property
    def start(self) -> int:
        """The running digit before the first step."""
        return int(self.prompt[0])


def sample_problem(rng: Random, difficulty: Difficulty | None = None) -> Problem:
    """Draw a problem; without a difficulty, easy and hard are equally likely."""
    if difficulty is None:
        difficulty = "easy" if rng.random() < 0.5 else "hard"
    start = rng.randrange(10)
    count = rng.choice(STEP_COUNTS[difficulty])
    steps = tuple(Step(rng.choice(OPERATORS), rng.randrange(10)) for _ in range(count))
    answer = start
    for step in steps:
        answer = step.apply(answer)
    body = "".join(f"{letter}{step.operator}{step.digit}" for letter, step in zip(LETTERS, steps, strict=False))
    return Problem(f"{start}{body}{PROMPT_END}", steps, answer, difficulty)


def reward(problem: Problem, response_text: str) -> float:
    """Return 1.0 if exactly the right digit follows the last ``#``, else 0.0."""
    _, mark, final = response_text.rpartition(ANSWER)
    return float(mark == ANSWER and final == str(problem.answer))
