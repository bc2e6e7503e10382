r"""Extract answers from the texts of trajectories, so that votes can be counted.

Three ways: a regular expression with one group, LaTeX's ``\boxed{}``, or a list of possible answers. Each takes the
last match in the text, since a trajectory ends with its answer, and gives ``None`` without one. White space around an
answer is dropped, and within it counts as one blank; otherwise two answers are equal only if they are written alike
(1/2 is not 0.5).

Regular expressions come from callers. They are run by RE2, whose time for a match is linear in the text and in the
compiled expression; in return it has no look-around and no back-references. Both are bounded: the last `TEXT_CHARS` of
a text are read, and an expression takes at most `PATTERN_BYTES`. Their product, for each match that is tried, can still
be minutes, so whatever runs an extractor must be able to end it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import re2

from darts_server.exceptions import InvalidRequest

TEXT_CHARS = 16_384
"""Characters that are read, from the end of a text. An answer before them is not found."""
PATTERN_CHARS = 1_000
PATTERN_BYTES = 1 << 20
"""Memory that a compiled expression may take."""
CHOICES = 100
CHOICE_CHARS = 200
BOXED = "boxed"
BOX = re.compile(r"\\boxed\s*\{")


class Extractor(Protocol):
    def extract(self, text: str) -> str | None:
        """Return the answer in ``text``, or ``None``."""
        ...


@dataclass(frozen=True, slots=True)
class RegexExtractor:
    """Extract what the group of ``pattern`` matches last.

    Raises:
        InvalidRequest: the pattern is too long, RE2 does not accept it, or it does not have exactly one group.
    """

    pattern: str
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", _compiled(self.pattern))

    def extract(self, text: str) -> str | None:
        found = None
        for match in self._compiled.finditer(_tail(text).encode(errors="replace")):
            found = match.group(1)
        return None if found is None else _normalise(found.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class BoxedExtractor:
    r"""Extract the content of the last complete ``\boxed{}``, with inner braces; of nested boxes the innermost."""

    def extract(self, text: str) -> str | None:
        text = _tail(text)
        starts = {box.end() for box in BOX.finditer(text)}
        start, end = max((pair for pair in _braces(text) if pair[0] in starts), default=(0, 0))
        return _normalise(text[start:end])


@dataclass(frozen=True, slots=True)
class ChoiceExtractor:
    """Extract the one of ``choices`` that ends last in the text, outside of longer words; of two the longer.

    Raises:
        InvalidRequest: there are no choices or too many, or one is empty or too long.
    """

    choices: Sequence[str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.choices) <= CHOICES:
            raise InvalidRequest("choices", f"must be 1 to {CHOICES} answers, got {len(self.choices)}")
        for choice in self.choices:
            if not 1 <= len(choice.strip()) <= len(choice) <= CHOICE_CHARS:
                raise InvalidRequest("choices", f"must have 1 to {CHOICE_CHARS} characters each, got {choice[:50]!r}")

    def extract(self, text: str) -> str | None:
        text = _tail(text)
        ends = [(_last_end(choice, text), len(choice), choice) for choice in self.choices]
        end, _, choice = max(ends)
        return _normalise(choice) if end else None


def create_extractor(pattern: str | Sequence[str]) -> Extractor:
    """Create an extractor from a regular expression with one group, ``boxed``, or a list of possible answers.

    Raises:
        InvalidRequest: the pattern cannot be used.
    """
    if isinstance(pattern, str):
        return BoxedExtractor() if pattern == BOXED else RegexExtractor(pattern)
    try:
        return ChoiceExtractor(tuple(pattern))
    except InvalidRequest as error:
        raise InvalidRequest("pattern.choices", error.message) from error


def _compiled(pattern: str) -> Any:
    if len(pattern) > PATTERN_CHARS:
        raise InvalidRequest(
            "pattern", f"has {len(pattern)} characters, at most {PATTERN_CHARS} are allowed; shorten it"
        )
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidRequest(
            "pattern", f"is not accepted by RE2 ({error}), which has no look-around and no back-references"
        ) from error
    if compiled.groups != 1:
        raise InvalidRequest(
            "pattern", f"must have exactly one group, the answer, got {compiled.groups}; write others as (?:...)"
        )
    return compiled


def _tail(text: str) -> str:
    return text[-TEXT_CHARS:]


def _normalise(answer: str) -> str | None:
    return " ".join(answer.split()) or None


def _braces(text: str) -> list[tuple[int, int]]:
    """Return start and end of the text between each pair of braces. A backslash escapes the next character."""
    pairs, opened, escaped = [], [], False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            opened.append(at + 1)
        elif char == "}" and opened:
            pairs.append((opened.pop(), at))
    return pairs


def _last_end(choice: str, text: str) -> int:
    """Return where the last occurrence outside of longer words ends; 0 if there is none."""
    start = text.rfind(choice)
    while start >= 0:
        end = start + len(choice)
        joined_before = start > 0 and text[start - 1].isalnum() and choice[0].isalnum()
        joined_after = end < len(text) and text[end].isalnum() and choice[-1].isalnum()
        if not joined_before and not joined_after:
            return end
        start = text.rfind(choice, 0, end - 1)
    return 0
