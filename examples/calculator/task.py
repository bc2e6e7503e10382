"""Arithmetic with a calculator: problems, the tool and the verifier. One character is one token.

A prompt ``47a+38b-12c*95>`` is a number and n steps. A step is a letter, an operator and a number. The letters are in
alphabetical order: they are anchors that make copying easy to learn. All numbers have two digits, all arithmetic is
modulo 100, from left to right.

A policy of this size cannot multiply two numbers, but it can copy them. It calls the calculator with the running number
and the next step, ``47a+38=``, and stops at ``=``. The calculator appends the result and ``>`` to the prompt of the
next turn. The final answer is ``#`` and a number::

    policy      47a+38=      85b-12=      73c*95=      #35
    calculator         85>          73>          35>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from darts_server.offline.demo.problems import ANSWER, EQUALS, LETTERS, LOOP, OPERATORS, PROMPT_END, Operator

MODULUS = 100
STEP_COUNTS = (2, 3, 4, 5)
SHORT_STEP_COUNTS = (2, 3)
"""Numbers of steps of the problems at the start of the curriculum."""
MAX_TOKENS = 320
"""Limit of a session in tokens, with its prompt: the positions of the policy."""
CALL = re.compile(rf"(\d\d)[{LETTERS}]([-+*])(\d\d){EQUALS}$")
NO_CALL = 2 * LOOP
"""The calculator's answer to text that is not a call."""

MEDIAN_TOOL_SECONDS = 0.03
TOOL_TAIL = 1.2
"""Exponent of the Pareto distribution of tool times. One call in fourteen takes more than five times the median."""
MAX_TOOL_SECONDS = 2.0


@dataclass(frozen=True)
class Step:
    """One operation on the running number."""

    letter: str
    operator: Operator
    number: int

    def apply(self, value: int) -> int:
        """Return the running number after this step."""
        return calculate(value, self.operator, self.number)


@dataclass(frozen=True)
class Problem:
    """A prompt and its answer."""

    start: int
    steps: tuple[Step, ...]

    @property
    def prompt(self) -> str:
        body = "".join(f"{step.letter}{step.operator}{step.number:02}" for step in self.steps)
        return f"{self.start:02}{body}{PROMPT_END}"

    @property
    def answer(self) -> int:
        value = self.start
        for step in self.steps:
            value = step.apply(value)
        return value


def sample_problem(rng: Random, step_counts: tuple[int, ...] = STEP_COUNTS) -> Problem:
    """Draw a problem with one of these numbers of steps."""
    start = rng.randrange(MODULUS)
    letters = LETTERS[: rng.choice(step_counts)]
    steps = [Step(letter, rng.choice(OPERATORS), rng.randrange(MODULUS)) for letter in letters]
    return Problem(start, tuple(steps))


def reward(problem: Problem, text: str) -> float:
    """Return 1.0 if exactly the right number follows the last ``#``, else 0.0."""
    _, mark, final = text.rpartition(ANSWER)
    return float(mark == ANSWER and final == f"{problem.answer:02}")


def calculate(left: int, operator: str, right: int) -> int:
    """Apply an operator, modulo 100."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % MODULUS


def calculator(turn: str) -> str:
    """Return the tool's answer to a turn that ends with a call: the result and ``>``."""
    call = CALL.search(turn)
    if call is None:
        return NO_CALL + PROMPT_END
    left, operator, right = call.groups()
    return f"{calculate(int(left), operator, int(right)):02}{PROMPT_END}"


def tool_seconds(rng: Random) -> float:
    """Draw the time of a call in seconds. Most calls are short, and a few take very long."""
    shortest = MEDIAN_TOOL_SECONDS / 2 ** (1 / TOOL_TAIL)
    return min(MAX_TOOL_SECONDS, shortest * rng.paretovariate(TOOL_TAIL))
