"""One timer that looks at the token counts of all groups."""

import asyncio
from typing import Protocol


class Pollable(Protocol):
    def peek(self) -> None:
        """Look at what runs and act on it. Never raises."""
        ...


class ProgressPoller:
    """Peeks at every registered group each ``interval`` seconds; sleeps for good while there is none."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._watched: set[Pollable] = set()
        self._timer: asyncio.Task[None] | None = None

    def add(self, watched: Pollable) -> None:
        self._watched.add(watched)
        if self._timer is None:
            self._timer = asyncio.create_task(self._tick(), name="darts-watch")

    def remove(self, watched: Pollable) -> None:
        self._watched.discard(watched)

    async def _tick(self) -> None:
        while self._watched:
            await asyncio.sleep(self._interval)
            for watched in list(self._watched):
                watched.peek()
        self._timer = None
