"""How far the observations of each server were learned from, so that each counts once."""

from collections.abc import Mapping
from typing import Any

from darts_server.policy.checks import check_count, check_length
from darts_server.rollout.learned.documents import DocumentStore, Parse, StoredValues

KIND, KEY = "observed", "all"
MAX_LIVES = 128
"""Of servers. A life ends with a restart, so the oldest ones are of servers that are gone."""
MAX_LIFE_CHARS = 64


def parse_positions(value: Any) -> dict[str, int]:
    """Parse the positions of a saved state.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(value, dict):
        raise ValueError("numbers of observations must be an object")
    check_length("lives", value, MAX_LIVES)
    for life, number in value.items():
        check_length("life", life, MAX_LIFE_CHARS)
        check_count("number", number)
    return value


PARSERS: dict[str, Parse] = {KIND: parse_positions}
"""How values are parsed, by kind."""


class Positions:
    """The number of the last observation that was learned from, by the life of its server, this one's too.

    They are stored with what was learned: a saved state says what is in it.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._stored = StoredValues(documents, KIND, PARSERS[KIND])
        self._numbers: dict[str, int] = self._stored.load(KEY) or {}

    @property
    def all(self) -> Mapping[str, int]:
        """By life, the one that was set last at the end."""
        return self._numbers

    def of(self, life: str) -> int:
        """Return the last number of a life; 0 if nothing of it was learned from."""
        return self._numbers.get(life, 0)

    def set(self, life: str, number: int) -> None:
        self._numbers.pop(life, None)
        self._numbers[life] = number
        while len(self._numbers) > MAX_LIVES:
            del self._numbers[next(iter(self._numbers))]

    def merge_restored(self) -> None:
        """Add what restored state has learned from. What was learned from before is not learned from again."""
        for life, number in (self._stored.load(KEY) or {}).items():
            self.set(life, max(number, self.of(life)))
        if self._numbers:
            self.save()

    def save(self) -> None:
        self._stored.save(KEY, self._numbers)
