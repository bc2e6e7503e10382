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
"""A tenth of a second takes about a thousandth of a core."""
LATE_SECONDS = 0.25
"""Callers notice a server that stands still for longer."""
LOG_SECONDS = 10.0
"""Minimum time between two log lines."""
STACK_DEPTH = 10
"""Innermost calls that are logged."""


@contextmanager
def watch_loop(
    report_delay: Callable[[float], None],
    interval: float = INTERVAL_SECONDS,
    late: float = LATE_SECONDS,
) -> Iterator[None]:
    """Measure the delay of a timer on the running event loop, and log the loop's stack while the timer is late.

    A thread takes the stack at the first moment after ``late`` seconds at which the interpreter is free. A call into C
    code that keeps the interpreter shows as the line that made the call. Times are in seconds.
    """
    loop = asyncio.get_running_loop()
    loop_thread = threading.get_ident()
    closed = threading.Event()
    # `loop.time()` would not do: the clock of uvloop stands still within a turn.
    due = time.monotonic() + interval
    timer = loop.call_later(interval, lambda: measure_delay())

    def measure_delay() -> None:
        nonlocal due, timer
        report_delay(max(0.0, time.monotonic() - due))
        due = time.monotonic() + interval
        timer = loop.call_later(interval, measure_delay)

    def log_stack_while_late() -> None:
        last_logged_due = 0.0
        silent_until = 0.0
        while not closed.wait(interval):
            now = time.monotonic()
            due_before = due
            delay = now - due_before
            # A long delay is logged once, and short delays must not fill the log.
            if delay < late or due_before == last_logged_due or now < silent_until:
                continue
            frame = sys._current_frames().get(loop_thread)
            # If the timer has fired meanwhile, the frame belongs to something else.
            if frame is None or due_before != due:
                continue

            last_logged_due = due_before
            silent_until = now + LOG_SECONDS
            frames = traceback.walk_stack(frame)
            # Source lines would be read from the disk.
            stack = traceback.StackSummary.extract(frames, limit=STACK_DEPTH, lookup_lines=False)
            calls = " < ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in stack)
            extra = {"seconds": round(delay, 3)}
            logger.warning(
                "the event loop is %.2f s late, in %s",
                delay,
                calls,
                extra=extra,
            )

    thread = threading.Thread(target=log_stack_while_late, name="darts-loop-lag", daemon=True)
    thread.start()
    try:
        yield
    finally:
        timer.cancel()
        closed.set()
        thread.join()
