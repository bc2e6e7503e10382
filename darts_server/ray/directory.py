"""The addresses of all servers of an application."""

import time
from collections.abc import Callable
from dataclasses import dataclass

EXPIRE_SECONDS = 15.0
"""An entry that is not renewed for so long belongs to a replica that is dead. They renew theirs every two seconds."""


@dataclass(slots=True)
class Entry:
    """One replica. ``url``: ``None`` until its server answers. ``seen_at``: on the directory's clock."""

    number: int
    url: str | None
    seen_at: float


class Directory:
    """Which servers there are.

    It keeps nothing on the disk: after a restart the replicas enter themselves again, with the numbers that they have.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}

    def announce(self, replica: str, url: str | None, number: int | None) -> int:
        """Enter a replica, or renew its entry; return its number.

        Args:
            replica: a name that no other replica has or had.
            url: of its server, once that answers.
            number: what it was given before. A replica without one gets the lowest that is free.
        """
        self._expire()
        if number is None:
            number = min(set(range(len(self._entries) + 1)) - {each.number for each in self._entries.values()})
        self._entries[replica] = Entry(number, url, self._clock())
        return number

    def leave(self, replica: str) -> None:
        """Remove a replica whose server has ended."""
        self._entries.pop(replica, None)

    def urls(self) -> list[str]:
        """Return the addresses of all servers that answer, in the order of the replicas' numbers."""
        self._expire()
        entries = sorted(self._entries.values(), key=lambda entry: entry.number)
        return [entry.url for entry in entries if entry.url is not None]

    def _expire(self) -> None:
        oldest = self._clock() - EXPIRE_SECONDS
        self._entries = {name: entry for name, entry in self._entries.items() if entry.seen_at >= oldest}
