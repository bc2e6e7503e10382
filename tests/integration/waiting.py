"""What tests do with a running server beside talking to it."""

import time

import psutil

from examples.tiny_rl.server import Server


def wait_idle(server: Server, seconds: float) -> float:
    """Wait until the engine has nothing to do; the seconds it took."""
    began = time.monotonic()
    while (left := server.busy()) > 0:
        assert time.monotonic() - began < seconds, f"{left} requests still on the engine after {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def engine_processes(server: Server) -> list[int]:
    """Process ids of the engine, without Python's own helpers."""
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
