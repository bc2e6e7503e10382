"""The gate before an engine: work passes it, unless the engine's weights are about to change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts what is inside, and keeps the rest outside while it is closed. One event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._alone: set[object] = set()
        self._closed: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._left = asyncio.Event()
        self._condemned: Exception | None = None

    @property
    def inside(self) -> int:
        """Pieces of work that have passed and not left."""
        return self._inside

    @property
    def closed(self) -> bool:
        return bool(self._closed)

    @asynccontextmanager
    async def held(self, *, at_once: bool = False, alone: bool = False) -> AsyncIterator[None]:
        """Pass, waiting while the gate is closed; leave with the block.

        ``at_once``: pass a closed gate too. For work that others wait for, who are inside already. ``alone``: no group
        is made of it.
        """
        while not (at_once or self._opened.is_set()):
            await self._opened.wait()
        self.let_in()
        me = object()
        if alone:
            self._alone.add(me)
        try:
            yield
        finally:
            self._alone.discard(me)
            self.leave()

    def let_in(self) -> None:
        """What is inside already begins more work, which has to `leave` too.

        Raises:
            Exception: that of `condemn`.
        """
        self.check()
        self._inside += 1

    def check(self) -> None:
        """
        Raises:
            Exception: that of `condemn`.
        """
        if self._condemned is not None:
            raise self._condemned

    def leave(self) -> None:
        self._inside -= 1
        self._left.set()

    def close(self, by: str = "") -> None:
        """Let nobody in until all who closed it, each by its own name, have opened it."""
        self._closed.add(by)
        self._opened.clear()

    def open(self, by: str = "") -> None:
        self._closed.discard(by)
        if not self._closed:
            self._opened.set()

    def condemn(self, error: Exception) -> None:
        """Nothing passes any more; all who wait or come get the error."""
        self._condemned = error
        self._opened.set()

    async def emptied(self, *, but_for_groups: bool = False) -> None:
        """Wait until nothing is inside, or nothing but groups."""
        while self._alone or (self._inside and not but_for_groups):
            self._left.clear()
            await self._left.wait()
