"""One timer that looks at the token counts of all groups."""

import asyncio
from typing import Protocol


class Watched(Protocol):
    def peek(self) -> None:
        """Look at what runs and act on it. Never raises."""
        ...


class Watch:
    """Peeks at every registered group each ``interval`` seconds; sleeps for good while there is none."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._watched: set[Watched] = set()
        self._timer: asyncio.Task[None] | None = None

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._timer is None:
            self._timer = asyncio.create_task(self._tick(), name="darts-watch")

    def remove(self, watched: Watched) -> None:
        self._watched.discard(watched)

    async def _tick(self) -> None:
        while self._watched:
            await asyncio.sleep(self._interval)
            for watched in list(self._watched):
                watched.peek()
        self._timer = None
