"""Gate in front of the engine, which is closed while a weight update is in progress."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts the work inside, and holds new work back while closed.

    A request of a group counts twice: as a request, because no update may begin while it waits for its allocation, and
    as a group, which may outlive the request.
    """

    def __init__(self) -> None:
        self.work_inside = 0
        self._unshaped_inside = 0
        self._closed_by: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._some_work_departed = asyncio.Event()
        # `auto` compares this number, to notice that the gate was closed during a measurement.
        self._num_openings = 0
        # Error of all work that waits or comes later: the engine is dead, the weights are lost, or the server stops.
        self._failure: Exception | None = None

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_by)

    @property
    def opening_number(self) -> int | None:
        """Number that changes each time the gate opens, or None while the gate is closed."""
        return None if self.is_closed else self._num_openings

    @asynccontextmanager
    async def enter(self, *, skip_wait: bool = False, unshaped: bool = False) -> AsyncIterator[None]:
        """Wait until the gate is open, and count as inside until the end of the block.

        ``skip_wait``: enter a closed gate too, because work inside waits for this work. ``unshaped``: the work belongs
        to no group.
        """
        if not skip_wait:
            await self.wait_open()
        self.let_in()
        self._unshaped_inside += unshaped
        try:
            yield
        finally:
            self._unshaped_inside -= unshaped
            self.leave()

    async def wait_open(self) -> None:
        # The gate may have been closed again before this task runs.
        while self._failure is None and not self._opened.is_set():
            await self._opened.wait()

    def let_in(self) -> None:
        """Count work until its `leave`."""
        self.raise_failure()
        self.work_inside += 1

    def raise_failure(self) -> None:
        if self._failure is not None:
            # Without this, the error's traceback would grow with each raise and keep the frames alive.
            raise self._failure.with_traceback(None)

    def leave(self) -> None:
        self.work_inside -= 1
        self._some_work_departed.set()

    def close(self, by: str = "") -> None:
        """Hold new work back until each ``by`` that closed the gate has opened it."""
        self._closed_by.add(by)
        self._opened.clear()

    def open(self, by: str = "") -> None:
        self._closed_by.discard(by)
        if not self._closed_by and not self._opened.is_set():
            self._num_openings += 1
            self._opened.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        # Work that waits wakes up, and raises the error.
        self._opened.set()

    async def wait_until_empty(self, *, except_groups: bool = False) -> None:
        """Wait until no work is inside, or only work of groups if ``except_groups``."""
        while self._unshaped_inside or (self.work_inside and not except_groups):
            self._some_work_departed.clear()
            await self._some_work_departed.wait()
