"""The problems of the tiny task and their verifier."""

import operator
import re
from random import Random

import pytest

from darts_server.demo.problems import STEP_COUNTS, Difficulty, Problem, Step, reward, sample_problem

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "hard")
ROUND = 5  # steps: the number of rounds left, and four of the prompt
EXAMPLE = Problem(
    "7a-5b*4c-8d+7>",
    (Step("-", 5), Step("*", 4), Step("-", 8), Step("+", 7)),
    7,
    "easy",
)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("a-5=2b*4=8c-8=0d+7=7#7", 1.0),
        ("#7", 1.0),
        ("a-5=2#1#7", 1.0),
        ("#7#1", 0.0),
        ("#1", 0.0),
        ("7", 0.0),
        ("#", 0.0),
        ("#77", 0.0),
        ("a-5=2b*4=8c-8=0d+7=7", 0.0),
        ("", 0.0),
    ],
)
def test_reward_reads_what_follows_the_last_mark(response: str, expected: float) -> None:
    assert reward(EXAMPLE, response) == expected


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_problem_has_step_count_of_its_difficulty_and_the_answer_of_its_steps(
    difficulty: Difficulty,
) -> None:
    rng = Random(1)
    for _ in range(200):
        problem = sample_problem(rng, difficulty)
        value = int(problem.prompt[0])
        for sign, digit in re.findall(r"[a-i]([-+*])(\d)", problem.prompt):
            value = ARITHMETIC[sign](value, int(digit)) % 10
        assert problem.difficulty == difficulty
        assert len(problem.steps) in STEP_COUNTS[difficulty]
        assert problem.answer == value


def test_both_difficulties_are_about_equally_frequent() -> None:
    rng = Random(4)
    easy = sum(sample_problem(rng).difficulty == "easy" for _ in range(1000))
    assert 430 < easy < 570


def test_a_looped_problem_applies_its_steps_in_every_round_after_the_number_of_rounds_left() -> None:
    problem = sample_problem(Random(3), "looped")
    assert re.fullmatch(r"\d@[89]a[-+*]\db[-+*]\dc[-+*]\dd[-+*]\d>", problem.prompt)
    value = problem.start
    for left in range(int(problem.prompt[2]), 0, -1):
        value = (value + left) % 10
        for sign, digit in re.findall(r"[a-d]([-+*])(\d)", problem.prompt):
            value = ARITHMETIC[sign](value, int(digit)) % 10
    assert problem.answer == value
    assert [letter for letter, _ in problem.chain()] == list("@abcd" * problem.rounds)


def test_stopping_a_looped_problem_early_is_right_little_more_often_than_a_guess() -> None:
    rng, tries = Random(4), 1500
    right: dict[int, int] = {}
    for _ in range(tries):
        problem = sample_problem(rng, "looped")
        value = problem.start
        for place, (_, step) in enumerate(problem.chain()):
            if place % ROUND == 0:
                right[place // ROUND] = right.get(place // ROUND, 0) + (value == problem.answer)
            value = step.apply(value)
    assert max(right.values()) / tries < 0.22


def test_no_step_of_a_looped_problem_makes_the_earlier_ones_irrelevant() -> None:
    rng = Random(5)
    steps = {step for _ in range(300) for step in sample_problem(rng, "looped").steps}
    assert len(steps) == 24
    assert all(len({step.apply(value) for value in range(10)}) == 10 for step in steps)
