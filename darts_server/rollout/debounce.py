"""Delay work a little, so that many requests for it are served by one run."""

import asyncio
from collections.abc import Callable


class Debounce:
    """Run ``work`` within ``seconds`` of the first request for it, however many requests follow meanwhile."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.run_pending)

    def run_pending(self) -> None:
        """Run the work now if it was requested."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._work()
