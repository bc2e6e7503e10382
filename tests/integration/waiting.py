"""Wait for a running server, and find its processes."""

import time

import psutil

from darts_server.offline.demo.server import Server

POLL_SECONDS = 0.06
"""Each poll of the metrics takes 25 ms of a core, which the server would have."""
STARTED, ENDED = "darts_candidates_started_total", "darts_candidates_ended_total"


def wait_idle(server: Server, seconds: float = 180.0) -> None:
    """Wait until the engine has nothing to do, and all candidates that were started have been counted as ended.

    The engine alone may look idle too early: what was just started is in its gauges after the next step, and that a
    caller has disconnected is noticed later.
    """
    began = time.monotonic()
    while (left := server.count_requests()) > 0 or (going := server.metric(STARTED) - server.metric(ENDED)):
        what = f"{left:.0f} requests still on the engine" if left else f"{going:.0f} candidates have not ended"
        assert time.monotonic() - began < seconds, f"{what} after {seconds} s"
        time.sleep(POLL_SECONDS)


def wait_started(server: Server, candidates: float, seconds: float = 180.0) -> None:
    """Wait until the server has started this many candidates in all."""
    wait_counted(server, STARTED, candidates, seconds)


def wait_counted(server: Server, counter: str, count: float, seconds: float = 180.0, **labels: str) -> None:
    """Wait until a counter is this high. A gauge may rise and fall between two polls, or be of an earlier step."""
    began = time.monotonic()
    while (now := server.metric(counter, **labels)) < count:
        assert time.monotonic() - began < seconds, f"{counter} is only {now} and not {count} after {seconds} s"
        time.sleep(POLL_SECONDS)


def engine_processes(server: Server, *, with_workers: bool = False) -> list[psutil.Process]:
    """Return the processes of the engine, without those of Python's resource trackers."""
    children = psutil.Process(server.process.pid).children(recursive=with_workers)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
