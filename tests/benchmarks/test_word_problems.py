"""Word problems are different from each other, and their rewards look at the last number of an answer."""

from random import Random

import pytest

from benchmarks.word_problems import STORIES, WordProblem, reward, word_problems


def test_problems_of_a_seed_are_different_and_always_the_same() -> None:
    problems = word_problems(3, 200)
    assert problems == word_problems(3, 200)
    assert len({problem.question for problem in problems}) == 200
    assert problems[0].question in problems[0].messages[0]["content"]


@pytest.mark.parametrize("story", STORIES)
def test_answers_are_natural_numbers(story: object) -> None:
    assert callable(story)
    rng = Random(0)
    assert all(story(rng).answer > 0 for _ in range(200))


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("2 * 600 = 1,200. The answer is 1,200.", True),
        ("The answer is 1200.0", True),
        ("1200 is too much, so 12", False),
        ("", False),
    ],
)
def test_the_last_number_counts(text: str, is_right: bool) -> None:
    assert reward(WordProblem("", 1200), text) == float(is_right)
