"""Answers are extracted in time from any text."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.estimates.answers import CHOICE_CHARS, CHOICES, PATTERN_CHARS, create_extractor, last_answer
from darts_server.exceptions import InvalidRequest


def extract(pattern: str | Sequence[str], text: str) -> str | None:
    return last_answer(create_extractor(pattern)(text))


# --- patterns ---------------------------------------------------------------


def test_a_pattern_extracts_the_last_match_of_its_group() -> None:
    pattern = r"(?i)answer is:? (-?\d+)"
    assert extract(pattern, "The answer is 3. No: the Answer is: 42") == "42"
    assert extract(pattern, "no idea") is None
    assert extract(r"x|(y)", "y x") is None
    assert extract(r"= ([^\n]+)", "= a \t b\n") == "a b"


def test_patterns_match_all_of_unicode() -> None:
    assert extract("réponse : (.)", "réponse : é") == "é"
    assert extract("(.)$", "a\ud800") == "?"


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(", "RE2"),
        (r"(a)(?=b)", "look-around"),
        (r"(a)\1", "back-references"),
        ("(\ud800)", "RE2"),
        (r"((a{1000}){1000})", "RE2"),
        ("(" + "(?:[^a]{500}){2}" * 60 + ")", "RE2"),
        ("no group", "exactly one group"),
        ("(a)(b)", "exactly one group"),
        ("(a" + "a" * PATTERN_CHARS + ")", "at most"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as refused:
        create_extractor(pattern)
    assert refused.value.field == "pattern"


@pytest.mark.parametrize("pattern", [r"((?:a+)+)$", r"((?:a|aa)+b)", r"(a.*b|a)", r"(?:a?){50}(a{50})b"])
def test_no_pattern_is_slow(pattern: str) -> None:
    """Backtracking would take for ever with the first two patterns."""
    began = time.process_time()
    extract(pattern, "a" * 16_384 + "!")
    assert time.process_time() - began < 5


def test_a_match_of_the_largest_pattern_takes_seconds_at_most() -> None:
    """RE2 follows 7,200 instructions at each byte, and no match can be interrupted."""
    began = time.process_time()
    next(create_extractor("((?:[^ab]?.?){400}~)")("\U0001f600" * 4_096), None)
    assert time.process_time() - began < 8
    with pytest.raises(InvalidRequest, match="too large"):
        create_extractor("((?:[^ab]?.?){500}~)")


# --- boxes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {a} \{ b }", r"{a} \{ b"),
        (r"\boxed {x }", "x"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\text{is } \boxed{3} }", "3"),
        (r"\boxed{7} but \boxed{8", "7"),
        (r"\boxed{7} but {\boxed{8}", "8"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", None),
        (r"boxed{3} \fbox{4} {5}", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract("boxed", text) == answer


@given(st.text(alphabet="ab{}\\ ", max_size=30), st.text(alphabet="ab ", min_size=1, max_size=5))
def test_text_before_the_last_box_does_not_matter(before: str, inner: str) -> None:
    assert extract("boxed", before + " ." + rf"\boxed{{{inner}}}") == (" ".join(inner.split()) or None)


def test_boxes_take_linear_time() -> None:
    began = time.process_time()
    assert extract("boxed", (r"\boxed " + " " * 8 + "{}") * 1000 + "{" * 16_384) is None
    assert time.process_time() - began < 1


# --- choices ----------------------------------------------------------------


def test_the_choice_that_ends_last_is_the_answer() -> None:
    letters = ["A", "B", "C"]
    assert extract(letters, "A or B? It is (B), not A-level. So B.") == "B"
    assert extract(letters, "B. About Cats and xA") == "B"
    assert extract(letters, "none") is None
    assert extract(["yes", "yes please", "no"], "no, yes please") == "yes please"
    assert extract(["yes", "oh yes"], "oh yes") == "oh yes"
    assert extract(["(a)"], "x(a)y") == "(a)"


@pytest.mark.parametrize("choices", [[], ["a"] * (CHOICES + 1), [" "], ["a" * (CHOICE_CHARS + 1)]])
def test_invalid_choices_are_refused(choices: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="must") as refused:
        create_extractor(choices)
    assert refused.value.field == "pattern.choices"
