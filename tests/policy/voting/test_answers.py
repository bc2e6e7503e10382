r"""Finding answers: the last that fits, in time, whatever the pattern and the text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest
from darts_server.policy.voting.answers import (
    CHOICE_CHARS,
    CHOICES,
    PATTERN_CHARS,
    TEXT_CHARS,
    BoxedExtractor,
    ChoiceExtractor,
    RegexExtractor,
    create_extractor,
)

# --- patterns ---------------------------------------------------------------


def test_a_pattern_extracts_the_last_match_of_its_group() -> None:
    pattern = RegexExtractor(r"(?i)answer is:? (-?\d+)")
    assert pattern.extract("The answer is 3. No: the Answer is: 42") == "42"
    assert pattern.extract("no idea") is None
    assert RegexExtractor(r"x|(y)").extract("y x") is None
    assert RegexExtractor(r"= ([^\n]+)").extract("= a \t b\n") == "a b"


def test_patterns_match_all_of_unicode() -> None:
    assert RegexExtractor("réponse : (.)").extract("réponse : é") == "é"
    assert RegexExtractor("(.)$").extract("a\ud800") == "?"


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
        RegexExtractor(pattern)
    assert refused.value.field == "pattern"


@pytest.mark.parametrize("pattern", [r"((?:a+)+)$", r"((?:a|aa)+b)", r"(a.*b|a)", r"(?:a?){50}(a{50})b"])
def test_no_pattern_is_slow(pattern: str) -> None:
    """Backtracking would take longer than the universe has been there for the first two."""
    began = time.process_time()
    RegexExtractor(pattern).extract("a" * 100_000 + "!")
    assert time.process_time() - began < 5


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
    assert BoxedExtractor().extract(text) == answer


@given(st.text(alphabet="ab{}\\ ", max_size=30), st.text(alphabet="ab ", min_size=1, max_size=5))
def test_text_before_the_last_box_does_not_matter(before: str, inner: str) -> None:
    assert BoxedExtractor().extract(before + " ." + rf"\boxed{{{inner}}}") == (" ".join(inner.split()) or None)


def test_only_the_end_of_a_long_text_is_read() -> None:
    far, near = r"\boxed{1}" + "." * TEXT_CHARS, r"\boxed{1}" + "." * (TEXT_CHARS - 9)
    assert (BoxedExtractor().extract(far), BoxedExtractor().extract(near)) == (None, "1")
    assert RegexExtractor(r"(1)").extract(far) is None
    assert ChoiceExtractor(["1"]).extract(far) is None


def test_boxes_take_linear_time() -> None:
    began = time.process_time()
    assert BoxedExtractor().extract((r"\boxed " + " " * 8 + "{}") * 1000 + "{" * TEXT_CHARS) is None
    assert time.process_time() - began < 1


# --- choices ----------------------------------------------------------------


def test_the_choice_that_ends_last_is_the_answer() -> None:
    letters = ChoiceExtractor(["A", "B", "C"])
    assert letters.extract("A or B? It is (B), not A-level. So B.") == "B"
    assert letters.extract("B. About Cats and xA") == "B"
    assert letters.extract("none") is None
    assert ChoiceExtractor(["yes", "yes please", "no"]).extract("no, yes please") == "yes please"
    assert ChoiceExtractor(["yes", "oh yes"]).extract("oh yes") == "oh yes"
    assert ChoiceExtractor(["(a)"]).extract("x(a)y") == "(a)"


@pytest.mark.parametrize("choices", [[], ["a"] * (CHOICES + 1), [" "], ["a" * (CHOICE_CHARS + 1)]])
def test_invalid_choices_are_refused(choices: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="choices: must"):
        ChoiceExtractor(choices)


def test_an_extractor_is_created_from_a_pattern_boxed_or_a_list() -> None:
    assert create_extractor("#(.)") == RegexExtractor("#(.)")
    assert create_extractor("boxed") == BoxedExtractor()
    assert create_extractor(["yes", "no"]) == ChoiceExtractor(("yes", "no"))
    with pytest.raises(InvalidRequest, match="must be 1 to") as refused:
        create_extractor([])
    assert refused.value.field == "pattern.choices"
