"""The problems of the tiny task and their verifier."""

import operator
import re
from random import Random

import pytest

from darts_server.demo.problems import STEP_COUNTS, Difficulty, Problem, Step, reward, sample_problem

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "hard")
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
