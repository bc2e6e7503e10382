"""The gate before an engine: work passes it, unless the engine's weights are about to change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts what is inside, and keeps the rest outside while it is closed. One event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._condemned: Exception | None = None

    @property
    def inside(self) -> int:
        """Pieces of work that have passed and not left."""
        return self._inside

    @asynccontextmanager
    async def held(self, *, at_once: bool = False) -> AsyncIterator[None]:
        """Pass, waiting while the gate is closed; leave with the block.

        ``at_once``: pass a closed gate too. For work that others wait for, who are inside already.
        """
        while not (at_once or self._opened.is_set()):
            await self._opened.wait()
        self.let_in()
        try:
            yield
        finally:
            self.leave()

    def let_in(self) -> None:
        """What is inside already begins more work, which has to `leave` too.

        Raises:
            Exception: that of `condemn`.
        """
        self.check()
        self._inside += 1
        self._emptied.clear()

    def check(self) -> None:
        """
        Raises:
            Exception: that of `condemn`.
        """
        if self._condemned is not None:
            raise self._condemned

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._emptied.set()

    def close(self) -> None:
        """Let nobody in for now."""
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def condemn(self, error: Exception) -> None:
        """Nothing passes any more; all who wait or come get the error."""
        self._condemned = error
        self._opened.set()

    async def emptied(self) -> None:
        """Wait until nothing is inside."""
        await self._emptied.wait()
