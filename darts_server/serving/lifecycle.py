"""Whether the server accepts work, and how long its shutdown may take."""

import asyncio

from darts_server.exceptions import DartsError

HAND_BACK_SECONDS = 5.0
"""Time to build the outputs of running work: the text of some million tokens."""
ANSWER_SECONDS = 2.0
"""Time for errors to reach their callers: milliseconds on the same machine."""
END_SECONDS = 30.0
"""Maximum time from the end of the grace period to the end of the process."""


class Lifecycle:
    def __init__(self) -> None:
        self.stop_reason: DartsError | None = None
        """None while the server accepts work."""
        self.requests = 0
        """Requests for work that are being handled."""
        self._stopped = asyncio.Event()

    def stop(self, reason: DartsError) -> None:
        """Accept no more work. The first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self._stopped.set()

    async def wait_for_stop(self) -> DartsError:
        await self._stopped.wait()
        assert self.stop_reason is not None
        return self.stop_reason
