"""The thread that writes, so that callers do not wait for the disk."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""Delay of a write, so that one write takes many documents. With the write itself it stays below the second that a
killed process may lose."""


class BackgroundWriter:
    """Calls ``write`` in a thread, ``seconds`` after a ``wake``, and again until it succeeds."""

    def __init__(self, write: Callable[[], None], seconds: float = FLUSH_SECONDS) -> None:
        self._write = write
        self._seconds = seconds
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.fault: str | None = None
        """Why the last write failed; None after one that succeeded."""
        self._thread = threading.Thread(target=self._run, name="darts-store", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Request a write."""
        self._wake.set()

    def stop(self) -> None:
        """Stop the thread, after a write in progress."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def try_write(self) -> Exception | None:
        """Write now, in the caller's thread. An error is returned, kept in ``fault`` and logged once."""
        try:
            self._write()
        except Exception as error:
            if self.fault != str(error):
                logger.error("the learned state cannot be written and is kept in memory until it can: %s", error)
            self.fault = str(error)
            return error
        if self.fault is not None:
            logger.warning("the learned state is written again")
        self.fault = None
        return None

    def _run(self) -> None:
        while not self._stop.is_set():  # checked after each clear, which may have cleared the wake of ``stop``
            self._wake.wait()
            if self._stop.wait(self._seconds):
                break
            self._wake.clear()
            if self.try_write():
                self._wake.set()
