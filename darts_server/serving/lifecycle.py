"""The end of a server's life: from when on it takes no work, why, and what becomes of the work that runs."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from darts_server.exceptions import DartsError, ServerStopping

ANSWER_SECONDS = 2.0
"""For errors to reach their callers; those who are here need milliseconds."""
LOOK_SECONDS = 0.05
RETRY_SECONDS = 30
"""What callers of a server that stops are told to wait: about what another one takes to start."""


class Life:
    """Whether the server takes work. One event loop."""

    def __init__(self) -> None:
        self.over: DartsError | None = None
        """Why no work is taken any more; ``None`` while it is."""
        self.requests = 0
        """Requests inside that ask for work."""
        self._ended = asyncio.Event()

    def end(self, error: DartsError) -> None:
        """Take no more work, for that reason. Of several, the first stays."""
        if self.over is None:
            self.over = error
            self._ended.set()

    async def ended(self) -> DartsError:
        """Wait for its end; the reason."""
        await self._ended.wait()
        assert self.over is not None
        return self.over

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A request that asks for work is inside until the block ends."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class Work(Protocol):
    """What runs on a server."""

    @property
    def busy(self) -> bool:
        """Whether anyone waits for anything that runs."""
        ...

    def hurry(self) -> None:
        """Nothing more will come: go on with what is there, and let go what nobody will ask for."""
        ...

    def fail(self, error: DartsError) -> None:
        """End all that runs, with this error for its callers."""
        ...


class Ending:
    """Brings a life that is over to its end.

    Args:
        grace: seconds that running work may take when the server is told to stop.
        leave: has the server go.
        look: seconds between two looks at whether work still runs.
    """

    def __init__(
        self, life: Life, work: Work, grace: float, leave: Callable[[], None], look: float = LOOK_SECONDS
    ) -> None:
        self._life = life
        self._work = work
        self._grace = grace
        self._leave = leave
        self._look = look

    def stop(self) -> None:
        """The server is told to stop."""
        self._life.end(
            ServerStopping("the server is stopping; send this to another one, or again later", RETRY_SECONDS)
        )
        self._work.hurry()

    async def run(self) -> None:
        """Wait for the end of the life, then for that of the work; have what is left fail."""
        error = await self._life.ended()
        if isinstance(error, ServerStopping):
            await self._quiet(self._grace)
        if self._busy:
            self._work.fail(error)
            await self._quiet(ANSWER_SECONDS)
        self._leave()

    @property
    def _busy(self) -> bool:
        return self._work.busy or self._life.requests > 0

    async def _quiet(self, seconds: float) -> None:
        left = seconds
        while self._busy and left > 0:
            await asyncio.sleep(self._look)
            left -= self._look
