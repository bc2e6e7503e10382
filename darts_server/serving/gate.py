"""A gate in front of the engine: closed while the engine's weights are about to change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Count the work that is inside, and hold new work back while closed. One event loop."""

    def __init__(self) -> None:
        self.inside = 0
        """Number of pieces of work that have entered and not left."""
        self._unshaped = 0
        self._closed_by: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._left = asyncio.Event()
        self._openings = 0
        self._error: Exception | None = None

    @property
    def closed(self) -> bool:
        return bool(self._closed_by)

    @property
    def opening(self) -> int | None:
        """A number that is the same for as long as the gate stays open; ``None`` while it is closed."""
        return None if self.closed else self._openings

    @asynccontextmanager
    async def enter(self, *, skip_wait: bool = False, unshaped: bool = False) -> AsyncIterator[None]:
        """Enter as soon as the gate is open, and leave at the end of the block.

        ``skip_wait``: enter a closed gate too, for work that others inside wait for. ``unshaped``: the work is not a
        group.
        """
        while not (skip_wait or self._opened.is_set()):
            await self._opened.wait()
        self.let_in()
        self._unshaped += unshaped
        try:
            yield
        finally:
            self._unshaped -= unshaped
            self.leave()

    def let_in(self) -> None:
        """Count one more piece of work, which must call `leave`.

        Raises:
            Exception: that of `fail`.
        """
        self.check()
        self.inside += 1

    def check(self) -> None:
        """Raise the error of `fail`, if the gate has failed."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # or it keeps everything that it is raised in

    def leave(self) -> None:
        self.inside -= 1
        self._left.set()

    def close(self, by: str = "") -> None:
        """Hold new work back until everyone who closed the gate, each with its own name, has opened it."""
        self._closed_by.add(by)
        self._opened.clear()

    def open(self, by: str = "") -> None:
        self._closed_by.discard(by)
        if not self._closed_by and not self._opened.is_set():
            self._openings += 1
            self._opened.set()

    def fail(self, error: Exception) -> None:
        """Raise this error in all work that waits or comes later."""
        self._error = error
        self._opened.set()

    async def wait_until_empty(self, *, except_groups: bool = False) -> None:
        """Wait until nothing is inside, or nothing but groups."""
        while self._unshaped or (self.inside and not except_groups):
            self._left.clear()
            await self._left.wait()
