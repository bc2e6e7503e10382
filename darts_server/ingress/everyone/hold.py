"""Hold new requests while the replicas change."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Longest time that an update waits for parts of batches to start. A server says at once that it has started one."""


class Hold:
    """Whether new requests wait."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._starts: set[Start] = set()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Let new requests wait until the block ends. It begins when all parts of divided batches have started."""
        self._open.clear()
        try:
            if starts := list(self._starts):
                waits = [asyncio.create_task(start.wait()) for start in starts]
                try:
                    _, waiting = await asyncio.wait(waits, timeout=START_SECONDS)
                finally:
                    for wait in waits:
                        wait.cancel()
                if waiting:
                    logger.warning("a batch has not started on all servers: its groups may have different weights")
            yield
        finally:
            self._open.set()

    async def wait(self) -> None:
        """Wait until requests may start."""
        while not self._open.is_set():  # it may be cleared again before this task runs
            await self._open.wait()

    def starting(self, parts: int) -> "Start":
        """Count a batch whose parts are sent now, and have not started yet."""
        start = Start(parts, self._starts)
        self._starts.add(start)
        return start


class Start:
    """The start of a divided batch."""

    def __init__(self, parts: int, starts: "set[Start]") -> None:
        self._missing = parts
        self._starts = starts
        self._started: set[str] = set()
        self._all_started = asyncio.Event()

    def part_started(self, replica: str) -> None:
        """Note that a replica's part has started, or never will."""
        self._started.add(replica)
        if len(self._started) == self._missing:
            self.end()

    def end(self) -> None:
        """Count the batch no longer."""
        self._starts.discard(self)
        self._all_started.set()

    async def wait(self) -> None:
        """Wait until all parts have started."""
        await self._all_started.wait()
