"""Watch a server from a thread of its own: how long /health takes; and measure its memory."""

import os
import threading
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

INTERVAL_SECONDS = 0.1
POLL_TIMEOUT_SECONDS = 60.0
MEGABYTE = 1024 * 1024


class HealthWatch:
    """Poll ``/health`` while the block runs.

    Time in which the server's main thread, or the one that polls, is ready and waits for a processor does not count:
    other processes take that.

    Args:
        pid: the server's process.
    """

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._pid = url, pid
        self._longest = 0.0
        self._pending: Stopwatch | None = None
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
        pending = self._pending
        waiting = 0.0 if pending is None else pending.seconds()
        longest, self._longest = max(self._longest, waiting), 0.0
        return longest

    def _poll(self) -> None:
        threads = {self._pid, threading.get_native_id()}
        with httpx.Client(timeout=POLL_TIMEOUT_SECONDS) as client:
            while not self._stopped.wait(INTERVAL_SECONDS):
                self._pending = poll = Stopwatch(threads)
                with suppress(httpx.HTTPError):  # a server that is gone is noticed by its process
                    client.get(f"{self._url}/health")
                    self._longest = max(self._longest, poll.seconds())
                self._pending = None


class Stopwatch:
    """Measure time, less what these threads waited for a processor one after the other.

    Args:
        threads: by their ids; that of a process is the id of its main thread.
    """

    def __init__(self, threads: Set[int]) -> None:
        self._threads, self._began, self._waited = threads, time.monotonic(), _seconds_in_queue(threads)

    def seconds(self) -> float:
        elapsed = time.monotonic() - self._began
        return max(0.0, elapsed - (_seconds_in_queue(self._threads) - self._waited))


def _seconds_in_queue(threads: Set[int]) -> float:
    """Return how long these threads were ready to run, but had no processor."""
    waited = 0.0
    for thread in threads:
        with suppress(OSError):  # it has ended
            waited += int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    return waited


def processes(pid: int) -> set[int]:
    """Return the ids of this process, that one, and its descendants."""
    found = {os.getpid(), pid}
    with suppress(psutil.NoSuchProcess):
        found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def megabytes(pid: int) -> float:
    """Return the resident memory of a process and its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total / MEGABYTE
