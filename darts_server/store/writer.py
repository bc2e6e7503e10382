"""The one thread that writes, so that no caller waits for the disk."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""From a document's arrival to its write. With the write itself it stays below the one second that may be lost."""


class Writer:
    """Calls ``write`` some ``seconds`` after a ``wake``, and again until it succeeds."""

    def __init__(self, write: Callable[[], None], seconds: float = FLUSH_SECONDS) -> None:
        self._write = write
        self._seconds = seconds
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.fault: str | None = None
        """Why the last try failed; None after one that succeeded."""
        self._thread = threading.Thread(target=self._run, name="darts-store", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread, not before a write that has begun."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def try_write(self) -> Exception | None:
        """Writes now, in the caller's thread. A failure is kept and logged once, and returned."""
        try:
            self._write()
        except Exception as error:
            if self.fault != str(error):
                logger.error("what is learned is kept in memory only, until this is mended: %s", error)
            self.fault = str(error)
            return error
        if self.fault is not None:
            logger.warning("what is learned is written again")
        self.fault = None
        return None

    def _run(self) -> None:
        while not self._stop.is_set():  # looked at after each clear, which may have undone the wake of ``stop``
            self._wake.wait()
            if self._stop.wait(self._seconds):
                break
            self._wake.clear()
            if self.try_write():
                self._wake.set()
