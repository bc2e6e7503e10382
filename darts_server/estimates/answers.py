r"""Extract the answers of trajectories.

An answer is found by a regular expression with one group, in LaTeX's ``\boxed{}``, or by a list of choices. The last
match counts, since a trajectory ends with its answer. White space around an answer is dropped, and white space within
becomes one blank. Otherwise two answers are equal only if they are written alike (1/2 is not 0.5).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import re2

from darts_server.exceptions import InvalidRequest

PATTERN_CHARS = 1_000
PATTERN_BYTES = 1 << 17
"""Memory limit of a compiled expression. The largest takes RE2 up to 40 µs for each byte of a text."""
CHOICES = 100
CHOICE_CHARS = 200
BOX = re.compile(r"\\boxed\s*\{")

Extractor = Callable[[str], Iterator[str | None]]
"""Yields the answer in a text so far; the last value counts. Its caller can stop if a user's pattern takes too long."""


def create_extractor(pattern: str | Sequence[str]) -> Extractor:
    """Create an extractor from a regular expression with one group, ``boxed``, or a list of choices.

    Raises:
        InvalidRequest: the pattern cannot be used.
    """
    if pattern == "boxed":
        return _find_boxes
    if not isinstance(pattern, str):
        if not 1 <= len(pattern) <= CHOICES:
            raise InvalidRequest("pattern.choices", f"must be 1 to {CHOICES} answers, got {len(pattern)}")
        for choice in pattern:
            if not 1 <= len(choice.strip()) <= len(choice) <= CHOICE_CHARS:
                raise InvalidRequest(
                    "pattern.choices",
                    f"must have 1 to {CHOICE_CHARS} characters each, got {choice[:50]!r}",
                )
        return partial(_find_choices, pattern)
    if len(pattern) > PATTERN_CHARS:
        raise InvalidRequest(
            "pattern",
            f"has {len(pattern)} characters, at most {PATTERN_CHARS} are allowed; shorten it",
        )

    # RE2's time for one match is linear in the text and in the compiled expression.
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidRequest(
            "pattern",
            f"is not accepted by RE2 ({error}), which has no look-around and no back-references",
        ) from error
    if compiled.groups != 1:
        raise InvalidRequest(
            "pattern",
            f"must have exactly one group, the answer, got {compiled.groups}; write others as (?:...)",
        )
    return partial(_find_matches, compiled)


def last_answer(answers: Iterable[str | None]) -> str | None:
    latest = None
    for answer in answers:
        latest = answer
    return latest


def _find_matches(compiled: Any, text: str) -> Iterator[str | None]:
    for match in compiled.finditer(text.encode(errors="replace")):
        # The group is None if the match does not use it.
        answer = match.group(1) or b""
        yield normalise(answer.decode(errors="replace"))


def _find_boxes(text: str) -> Iterator[str | None]:
    r"""Find the content of the last complete ``\boxed{}``, with inner braces."""
    box_starts = {box.end() for box in BOX.finditer(text)}
    answer_start = 0
    answer_end = 0
    open_braces: list[int] = []
    # Escaped characters are matched too, so that an escaped brace is not a brace.
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if found[0] == "{":
            open_braces.append(found.end())
        elif found[0] == "}" and open_braces:
            start = open_braces.pop()
            # The box that begins last counts: of nested boxes, the inner box.
            if start in box_starts and start > answer_start:
                answer_start = start
                answer_end = found.start()
    yield normalise(text[answer_start:answer_end])


def _find_choices(choices: Sequence[str], text: str) -> Iterator[str | None]:
    """Find the choice that ends last in the text, outside of longer words. Of two choices the longer counts."""
    # End, length and text of the best choice so far.
    best = (0, 0, "")
    for choice in choices:
        start = text.rfind(choice)
        while start >= 0:
            end = start + len(choice)
            joins_before = start > 0 and text[start - 1].isalnum() and choice[0].isalnum()
            joins_after = end < len(text) and text[end].isalnum() and choice[-1].isalnum()
            if not joins_before and not joins_after:
                best = max(best, (end, len(choice), choice))
                break
            # It is a part of a longer word, so search before it.
            start = text.rfind(choice, 0, end - 1)
        # The caller may stop here if the choices take too long.
        yield normalise(best[2])


def normalise(answer: str) -> str | None:
    return " ".join(answer.split()) or None
