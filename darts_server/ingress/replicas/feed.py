"""The newest observations of one server, as the ingress has read them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_BYTES = 4 * 1024 * 1024
"""Some five thousand groups. Servers that could not be reached for longer miss the older ones."""


@dataclass(slots=True)
class Feed:
    """Observations of the life of a server, by number, as JSON texts.

    ``last``: number of the newest one. ``is_whole``: whether all since the first are here.
    """

    life: str
    max_bytes: int = MAX_BYTES
    last: int = 0
    is_whole: bool = True
    _texts: deque[tuple[int, str]] = field(default_factory=deque)
    _bytes: int = 0

    def add(self, number: int, text: str) -> None:
        """Add the next one. One that was read before is ignored."""
        if number <= self.last:
            return
        self.is_whole &= number == self.last + 1
        self.last = number
        self._texts.append((number, text))
        self._bytes += len(text)
        while self._bytes > self.max_bytes and len(self._texts) > 1:
            self._bytes -= len(self._texts.popleft()[1])
            self.is_whole = False

    def after(self, number: int) -> Iterator[tuple[int, str]]:
        """Yield those after a number, with theirs, in order."""
        if number >= self.last:
            return
        yield from [each for each in self._texts if each[0] > number]
