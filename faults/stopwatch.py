"""Measure how long a server takes, less the time in which other processes had the processor."""

import os
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import psutil


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
