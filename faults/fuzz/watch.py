"""Watch a server from a thread of its own: how long /health takes; and measure its memory."""

import threading
import time
from contextlib import suppress

import httpx
import psutil

INTERVAL_SECONDS = 0.1
LATE_SECONDS = 0.3
"""When this thread itself wakes up later than that, the machine is too busy for the poll to count."""
POLL_TIMEOUT_SECONDS = 60.0
MEGABYTE = 1024 * 1024


class HealthWatch:
    """Poll ``/health`` while the block runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._longest = 0.0
        self._pending_since: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="health", daemon=True)

    def __enter__(self) -> "HealthWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(INTERVAL_SECONDS)  # a poll of a server that hangs is left behind

    def longest(self) -> float:
        """Return the longest poll since the last call, in seconds; a poll that is still waiting counts."""
        pending = self._pending_since
        waiting = 0.0 if pending is None else time.monotonic() - pending
        longest, self._longest = max(self._longest, waiting), 0.0
        return longest

    def _poll(self) -> None:
        with httpx.Client(timeout=POLL_TIMEOUT_SECONDS) as client:
            while True:
                planned = time.monotonic() + INTERVAL_SECONDS
                if self._stopped.wait(INTERVAL_SECONDS):
                    return
                self._pending_since = began = time.monotonic()
                with suppress(httpx.HTTPError):  # a server that is gone is noticed by its process
                    client.get(f"{self._url}/health")
                    if began - planned < LATE_SECONDS:
                        self._longest = max(self._longest, time.monotonic() - began)
                self._pending_since = None


def megabytes(pid: int) -> float:
    """Return the resident memory of a process and its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total / MEGABYTE
