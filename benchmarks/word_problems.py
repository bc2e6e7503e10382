"""Word problems in arithmetic, with their answers, for language models. They are drawn from a few stories."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

NAMES = ("Amira", "Bela", "Chen", "Dario", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas")
THINGS = ("apples", "pencils", "stickers", "marbles", "cards", "shells", "buttons", "coins")
INSTRUCTION = "Solve the problem step by step. End with 'The answer is' and a number."
MAX_TOKENS = 160
"""Length limit of an answer. Most answers of SmolLM2-135M end before it."""


@dataclass(frozen=True)
class WordProblem:
    """A question, and the number that answers it."""

    question: str
    answer: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that asks the question."""
        return [{"role": "user", "content": f"{self.question} {INSTRUCTION}"}]


def sample_word_problem(rng: Random) -> WordProblem:
    """Draw a problem."""
    return rng.choice(STORIES)(rng)


def word_problems(seed: int, count: int) -> list[WordProblem]:
    """Return different problems."""
    rng = Random(seed)
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        problem = sample_word_problem(rng)
        found[problem.question] = problem
    return list(found.values())


def reward(problem: WordProblem, text: str) -> float:
    """Return 1.0 if the last number of an answer is right, else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == problem.answer)


def _presents(rng: Random) -> WordProblem:
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    had = rng.randint(20, 60)
    given = rng.randint(3, 15)
    bought = rng.randint(3, 15)
    question = (
        f"{first} has {had} {things}. {first} gives {given} {things} to {second} and then buys {bought} more. "
        f"How many {things} does {first} have now?"
    )
    return WordProblem(question, had - given + bought)


def _boxes(rng: Random) -> WordProblem:
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    boxes = rng.randint(3, 9)
    each = rng.randint(4, 12)
    lost = rng.randint(2, 11)
    question = (
        f"{name} fills {boxes} boxes with {each} {things} each. Later {name} loses {lost} {things}. "
        f"How many {things} are left?"
    )
    return WordProblem(question, boxes * each - lost)


def _wages(rng: Random) -> WordProblem:
    name = rng.choice(NAMES)
    days = rng.randint(3, 6)
    hours = rng.randint(2, 8)
    wage = rng.randint(7, 15)
    question = (
        f"{name} works {hours} hours a day for {days} days and earns {wage} dollars an hour. "
        f"How many dollars does {name} earn in all?"
    )
    return WordProblem(question, days * hours * wage)


def _shares(rng: Random) -> WordProblem:
    name = rng.choice(NAMES)
    things = rng.choice(THINGS)
    friends = rng.randint(2, 8)
    share = rng.randint(3, 12)
    kept = rng.randint(1, 9)
    total = friends * share + kept
    question = (
        f"{name} has {total} {things}, keeps {kept} of them, and shares the rest equally among {friends} friends. "
        f"How many {things} does each friend get?"
    )
    return WordProblem(question, share)


def _trips(rng: Random) -> WordProblem:
    name = rng.choice(NAMES)
    speed = rng.choice((30, 40, 50, 60))
    first = rng.randint(2, 5)
    second = rng.randint(1, 4)
    question = (
        f"{name} drives for {first} hours at {speed} km an hour, rests, and drives for another {second} hours at the "
        f"same speed. How many km does {name} drive?"
    )
    return WordProblem(question, speed * (first + second))


def _savings(rng: Random) -> WordProblem:
    first, second = rng.sample(NAMES, 2)
    amount = rng.randint(5, 20)
    weeks = rng.randint(3, 9)
    start = rng.randint(1, 30)
    question = (
        f"{first} saves {amount} dollars a week for {weeks} weeks. {second} has {start} dollars. "
        f"How many dollars do they have together?"
    )
    return WordProblem(question, amount * weeks + start)


STORIES: tuple[Callable[[Random], WordProblem], ...] = (_presents, _boxes, _wages, _shares, _trips, _savings)


def batch(problems: list[WordProblem]) -> list[dict[str, Any]]:
    """Return the problems as prompts of a batch."""
    return [{"messages": problem.messages} for problem in problems]
