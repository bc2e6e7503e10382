"""Watch how late the event loop is, and log what holds it."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.1
"""Between two measurements, which together take about a thousandth of a core."""
LATE_SECONDS = 0.25
"""Callers notice a server that stands still for longer."""
LOG_SECONDS = 10.0
"""Between two log lines."""
STACK_DEPTH = 10
"""Innermost calls that are logged."""


class LoopLag:
    """Measure the delay of a timer of the event loop, and log from a thread what the loop does while it is late.

    As a context manager, entered in the event loop. The stack is that of the first moment after `LATE_SECONDS` at which
    the interpreter is free; a call into C code that keeps it shows as the line that made the call.

    Args:
        observe: called with each delay, in seconds.
        interval, late: seconds between two measurements, and from which delay on the stack is logged.
    """

    def __init__(
        self, observe: Callable[[float], None], interval: float = INTERVAL_SECONDS, late: float = LATE_SECONDS
    ) -> None:
        self._observe = observe
        self._interval = interval
        self._late = late
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="darts-loop-lag", daemon=True)

    def __enter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._schedule()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._closed.set()
        self._thread.join()

    def _schedule(self) -> None:
        self._due = time.monotonic() + self._interval  # uvloop's own clock stands still within a turn
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._measure)

    def _measure(self) -> None:
        self._observe(max(0.0, time.monotonic() - self._due))
        self._schedule()

    def _watch(self) -> None:
        logged_for, silent_until = 0.0, 0.0
        while not self._closed.wait(self._interval):
            now, due = time.monotonic(), self._due
            if now - due < self._late or due == logged_for or now < silent_until:
                continue
            frame = sys._current_frames().get(self._loop_thread)
            if frame is not None and due == self._due:
                logged_for, silent_until = due, now + LOG_SECONDS
                extra = {"seconds": round(now - due, 3)}
                logger.warning("the event loop is %.2f s late, in %s", now - due, describe_stack(frame), extra=extra)


def describe_stack(frame: FrameType) -> str:
    """Return the innermost calls of a stack on one line, the innermost first."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=STACK_DEPTH, lookup_lines=False)
    return " < ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in stack)
