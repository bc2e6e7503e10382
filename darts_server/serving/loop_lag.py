"""Watch how late the event loop is, and log what holds it."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.1
"""Between two measurements, which together take about a thousandth of a core."""
LATE_SECONDS = 0.25
"""Callers notice a server that stands still for longer."""
LOG_SECONDS = 10.0
"""Between two log lines."""
STACK_DEPTH = 10
"""Innermost calls that are logged."""


@contextmanager
def watch_loop(
    observe: Callable[[float], None], interval: float = INTERVAL_SECONDS, late: float = LATE_SECONDS
) -> Iterator[None]:
    """Measure the delay of a timer of the event loop, and log from a thread what the loop does while it is late.

    To be entered in the event loop. The stack is that of the first moment after `LATE_SECONDS` at which the interpreter
    is free; a call into C code that keeps it shows as the line that made the call.

    Args:
        observe: called with each delay, in seconds.
        interval, late: seconds between two measurements, and from which delay on the stack is logged.
    """
    loop, loop_thread, closed = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    due = time.monotonic() + interval  # uvloop's own clock stands still within a turn
    timer = loop.call_later(interval, lambda: measure())

    def measure() -> None:
        nonlocal due, timer
        observe(max(0.0, time.monotonic() - due))
        due = time.monotonic() + interval
        timer = loop.call_later(interval, measure)

    def watch() -> None:
        logged_for, silent_until = 0.0, 0.0
        while not closed.wait(interval):
            now, awaited = time.monotonic(), due
            if now - awaited < late or awaited == logged_for or now < silent_until:
                continue
            frame = sys._current_frames().get(loop_thread)
            if frame is not None and awaited == due:
                logged_for, silent_until = awaited, now + LOG_SECONDS
                extra = {"seconds": round(now - awaited, 3)}
                stack = traceback.StackSummary.extract(
                    traceback.walk_stack(frame), limit=STACK_DEPTH, lookup_lines=False
                )
                calls = " < ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in stack)
                logger.warning("the event loop is %.2f s late, in %s", now - awaited, calls, extra=extra)

    thread = threading.Thread(target=watch, name="darts-loop-lag", daemon=True)
    thread.start()
    try:
        yield
    finally:
        timer.cancel()
        closed.set()
        thread.join()
