"""Work that is put off a little, so that many causes share one doing."""

import asyncio
from collections.abc import Callable


class Debounce:
    """Does ``work`` within ``seconds`` of being asked, however often it is asked meanwhile."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.now)

    def now(self) -> None:
        """Do what was asked for, if anything was."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._work()
