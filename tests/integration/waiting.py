"""Wait for a running server, and find its processes."""

import time

import psutil

from darts_server.demo.server import Server


def wait_idle(server: Server, seconds: float = 60.0) -> float:
    """Wait until the engine has nothing to do; return the seconds it took."""
    began = time.monotonic()
    while (left := server.busy()) > 0:
        assert time.monotonic() - began < seconds, f"{left} requests still on the engine after {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def wait_started(server: Server, candidates: float, seconds: float = 60.0) -> None:
    """Wait until the server has started this many candidates in all."""
    wait_counted(server, "darts_candidates_started_total", candidates, seconds)


def wait_counted(server: Server, counter: str, count: float, seconds: float = 60.0) -> None:
    """Wait until a counter is this high. A gauge may rise and fall between two polls, or be of an earlier step."""
    began = time.monotonic()
    while (now := server.metric(counter)) < count:
        assert time.monotonic() - began < seconds, f"{counter} is only {now} and not {count} after {seconds} s"
        time.sleep(0.02)


def engine_processes(server: Server) -> list[int]:
    """Return the process ids of the engine, without that of Python's resource tracker."""
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
