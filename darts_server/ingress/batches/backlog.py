"""Events of all parts of a batch that wait until its caller reads them."""

import asyncio
from collections import deque

from darts_server.ingress.batches.events import Event

Item = Event | Exception | None


class Backlog:
    """A queue in which those who may not be delayed do not wait for room.

    Args:
        room: number of events for which there is room.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._items: deque[Item] = deque()
        self._added = asyncio.Event()
        self._taken = asyncio.Event()

    def add(self, item: Item) -> None:
        """Add an item, whether there is room or not."""
        self._items.append(item)
        self._added.set()

    async def wait_for_room(self) -> None:
        while len(self._items) >= self._room:
            self._taken.clear()
            await self._taken.wait()

    async def take(self) -> Item:
        """Wait for the next item, and take it."""
        while not self._items:
            self._added.clear()
            await self._added.wait()
        self._taken.set()
        return self._items.popleft()
