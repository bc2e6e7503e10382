"""What tests do with a running server beside talking to it."""

import time

import psutil

from darts_server.demo.server import Server


def wait_idle(server: Server, seconds: float) -> float:
    """Wait until the engine has nothing to do; the seconds it took."""
    began = time.monotonic()
    while (left := server.busy()) > 0:
        assert time.monotonic() - began < seconds, f"{left} requests still on the engine after {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def wait_started(server: Server, candidates: float, seconds: float = 60.0) -> None:
    """Wait until the server has started that many candidates in all.

    A counter, unlike a gauge, cannot be missed by who looks too late.
    """
    began = time.monotonic()
    while (started := server.metric("darts_candidates_started_total")) < candidates:
        assert time.monotonic() - began < seconds, f"only {started} of {candidates} candidates after {seconds} s"
        time.sleep(0.02)


def engine_processes(server: Server) -> list[int]:
    """Process ids of the engine, without Python's own helpers."""
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
