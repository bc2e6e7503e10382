import operator
import re
from collections.abc import Iterable
from random import Random

import pytest

from darts_server.offline.demo.problems import STEP_COUNTS, Difficulty, Problem, Step, reward, sample_problem

ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "hard")
STEPS = Step("a", "-", 5), Step("b", "*", 4), Step("c", "-", 8), Step("d", "+", 7)
EXAMPLE = Problem("7a-5b*4c-8d+7>", STEPS, 7, "easy")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("a-5=2b*4=8c-8=0d+7=7#7", 1.0),
        ("#7", 1.0),
        ("a-5=2#1#7", 1.0),
        ("#7#1", 0.0),
        ("#", 0.0),
        ("#77", 0.0),
        ("a-5=2b*4=8c-8=0d+7=7", 0.0),
        ("", 0.0),
    ],
)
def test_reward_compares_the_text_after_the_last_mark(response: str, expected: float) -> None:
    assert reward(EXAMPLE, response) == expected


def test_a_problem_has_the_step_count_of_its_difficulty_and_the_answer_of_its_steps() -> None:
    rng = Random(1)
    for difficulty in DIFFICULTIES * 200:
        problem = sample_problem(rng, difficulty)
        assert problem.difficulty == difficulty
        assert len(problem.chain) in STEP_COUNTS[difficulty]
        assert problem.answer == result(problem, [0])


def test_a_looped_problem_applies_its_steps_in_every_round_after_the_number_of_rounds_left() -> None:
    problem = sample_problem(Random(3), "looped")
    assert re.fullmatch(r"\d@[89]a[-+*]\db[-+*]\dc[-+*]\dd[-+*]\d>", problem.prompt)
    rounds = int(problem.prompt[2])
    assert problem.answer == result(problem, range(rounds, 0, -1))
    assert [step.letter for step in problem.chain] == list("@abcd" * rounds)


def result(problem: Problem, added: Iterable[int]) -> int:
    """Apply the steps of the prompt in rounds, each after a number that is added."""
    value = int(problem.prompt[0])
    for number in added:
        value = (value + number) % 10
        for sign, digit in re.findall(r"[a-i]([-+*])(\d)", problem.prompt):
            value = ARITHMETIC[sign](value, int(digit)) % 10
    return value
