"""Whether a server accepts work, and how long its shutdown may take."""

import asyncio

from darts_server.exceptions import DartsError

HAND_BACK_SECONDS = 5.0
"""For what running work has generated to be put together: the text of some million tokens."""
ANSWER_SECONDS = 2.0
"""For errors to reach their callers; on the same machine that takes milliseconds."""
END_SECONDS = 30.0
"""From the end of the grace time to the end of the process, at most: what takes so long has a limit of its own."""


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
