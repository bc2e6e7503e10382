r"""Finding the answer in a trajectory's text, so that votes can be counted.

Three ways: a regular expression with one group, LaTeX's ``\boxed{}``, or a list of the answers there may be. Each takes
the last place in the text that fits, since a trajectory ends with its answer, and gives ``None`` where none does. White
space around an answer is dropped, and within it counts as one blank; beyond that two answers are the same only if they
are written alike (1/2 is not 0.5).

Patterns come from callers, so none may cost much. They are run by RE2, whose time is linear in the text whatever the
pattern; therefore it knows no look-around and no back-references. Patterns and what they compile to are bounded, and
only the last `TEXT_CHARS` of a text are read: finding all matches can take the square of that, some 0.2 seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import re2

from darts_server.exceptions import InvalidRequest

TEXT_CHARS = 16_384
"""Read from the end of a text. An answer further up is not found."""
PATTERN_CHARS = 1_000
PATTERN_BYTES = 1 << 20
"""Memory that a compiled pattern may take."""
CHOICES = 100
CHOICE_CHARS = 200
BOX = r"\boxed"


class Extractor(Protocol):
    def extract(self, text: str) -> str | None:
        """The answer in ``text``, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class RegexExtractor:
    """What the group of ``pattern`` matched last.

    Raises:
        InvalidRequest: it is too long, RE2 does not take it, or it has not exactly one group.
    """

    pattern: str
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", _compiled(self.pattern))

    def extract(self, text: str) -> str | None:
        found = None
        for match in self._compiled.finditer(_read(text).encode(errors="replace")):
            found = match.group(1)
        return None if found is None else _tidy(found.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class BoxedExtractor:
    r"""What the last complete ``\boxed{}`` holds, with its inner braces; of boxes within boxes the innermost."""

    def extract(self, text: str) -> str | None:
        text = _read(text)
        boxes = [(start, end) for start, end in _braces(text) if text[: start - 1].rstrip().endswith(BOX)]
        start, end = max(boxes, default=(0, 0))
        return _tidy(text[start:end])


@dataclass(frozen=True, slots=True)
class ChoiceExtractor:
    """The one of ``choices`` that stands last in the text, and not within a longer word; of two the longer.

    Raises:
        InvalidRequest: there are none or too many, or one is empty or too long.
    """

    choices: Sequence[str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.choices) <= CHOICES:
            raise InvalidRequest("choices", f"must be 1 to {CHOICES} answers, got {len(self.choices)}")
        for choice in self.choices:
            if not 1 <= len(choice.strip()) <= len(choice) <= CHOICE_CHARS:
                raise InvalidRequest("choices", f"must have 1 to {CHOICE_CHARS} characters each, got {choice[:50]!r}")

    def extract(self, text: str) -> str | None:
        text = _read(text)
        places = [(_last(choice, text), len(choice), choice) for choice in self.choices]
        end, _, choice = max(places)
        return _tidy(choice) if end else None


def _compiled(pattern: str) -> Any:
    if len(pattern) > PATTERN_CHARS:
        raise InvalidRequest("pattern", f"has {len(pattern)} characters, at most {PATTERN_CHARS} are taken; shorten it")
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    options.log_errors = False
    try:
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidRequest(
            "pattern", f"is not taken by RE2 ({error}); it knows no look-around and no back-references"
        ) from error
    if compiled.groups != 1:
        raise InvalidRequest(
            "pattern", f"must have exactly one group, the answer, got {compiled.groups}; write others as (?:...)"
        )
    return compiled


def _read(text: str) -> str:
    return text[-TEXT_CHARS:]


def _tidy(answer: str) -> str | None:
    return " ".join(answer.split()) or None


def _braces(text: str) -> list[tuple[int, int]]:
    """Start and end of what is between each pair of braces; a backslash takes the next character's meaning."""
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


def _last(choice: str, text: str) -> int:
    """Where the last occurrence that is no part of a longer word ends; 0 if there is none."""
    start = text.rfind(choice)
    while start >= 0:
        end = start + len(choice)
        joined_before = start > 0 and text[start - 1].isalnum() and choice[0].isalnum()
        joined_after = end < len(text) and text[end].isalnum() and choice[-1].isalnum()
        if not joined_before and not joined_after:
            return end
        start = text.rfind(choice, 0, end - 1)
    return 0
