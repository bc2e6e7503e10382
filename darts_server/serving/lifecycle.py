"""Shutdown of a server: when it stops accepting work, why, and what happens to running work."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from darts_server.exceptions import DartsError, ServerStopping

logger = logging.getLogger(__name__)

HAND_BACK_SECONDS = 5.0
"""For what running work has generated to be put together: the text of some million tokens."""
ANSWER_SECONDS = 2.0
"""For errors to reach their callers; on the same machine that takes milliseconds."""
END_SECONDS = 30.0
"""From the end of the grace time to the end of the process, at most: what takes so long has a limit of its own."""
POLL_SECONDS = 0.05
RETRY_SECONDS = 30
"""``Retry-After`` of a stopping server: about the time in which another one starts."""


class Lifecycle:
    """Whether the server accepts work. One event loop."""

    def __init__(self) -> None:
        self.stop_reason: DartsError | None = None
        """Why the server accepts no more work; ``None`` while it does."""
        self.requests = 0
        """Requests for work that are being handled."""
        self._stopped = asyncio.Event()

    def stop(self, reason: DartsError) -> None:
        """Accept no more work. Later reasons are ignored."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self._stopped.set()

    async def wait_for_stop(self) -> DartsError:
        """Wait until the server accepts no more work, and return the reason."""
        await self._stopped.wait()
        assert self.stop_reason is not None
        return self.stop_reason

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count a request for work while it is handled."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class Drainable(Protocol):
    """A part of the work that runs on a server."""

    def drain(self) -> None:
        """Cancel work that has no connected caller, and wait for no further requests."""

    async def hand_back(self, reason: DartsError) -> None:
        """End work whose callers can take it unfinished, or for which it is kept, with what it has generated."""

    def fail(self, error: DartsError) -> None:
        """Fail all running work with this error."""


class RunningWork(Drainable, Protocol):
    """All the work that runs on a server."""

    @property
    def is_busy(self) -> bool:
        """Whether any caller waits for running work."""


class Shutdown:
    """Drain running work after a stop, hand back what has not ended, fail what is left, and exit.

    Args:
        grace: seconds that running work may take after a stop by signal.
        exit: stops the HTTP server.
        poll_seconds: interval at which running work is checked.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        work: RunningWork,
        grace: float,
        exit: Callable[[], None],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._lifecycle = lifecycle
        self._work = work
        self._grace = grace
        self._exit = exit
        self._poll_seconds = poll_seconds

    def begin(self) -> None:
        """Stop accepting work, and drain."""
        self._lifecycle.stop(
            ServerStopping("the server is stopping; send this to another one, or retry later", RETRY_SECONDS)
        )
        self._work.drain()

    async def run(self) -> None:
        """Wait for the stop, give running work its grace time, hand it back or fail it, and exit."""
        reason = await self._lifecycle.wait_for_stop()
        if isinstance(reason, ServerStopping):
            await self._wait_until_idle(self._grace)
            if self._is_busy:
                try:
                    async with asyncio.timeout(HAND_BACK_SECONDS):
                        await self._work.hand_back(reason)
                except Exception:  # it fails then, as other work does
                    logger.exception("running work could not be handed back")
        if self._is_busy:
            self._work.fail(reason)
            await self._wait_until_idle(ANSWER_SECONDS)
        self._exit()

    @property
    def _is_busy(self) -> bool:
        return self._work.is_busy or self._lifecycle.requests > 0

    async def _wait_until_idle(self, timeout: float) -> None:
        remaining = timeout
        while self._is_busy and remaining > 0:
            await asyncio.sleep(self._poll_seconds)
            remaining -= self._poll_seconds
