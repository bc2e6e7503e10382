"""Run a command that starts a Ray cluster, and end it with everything that it has started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from darts_server.demo.server import ENVIRONMENT
from tests.deploy.names import ROOT
from tests.integration.clusters import wait_healthy
from tests.integration.fork_server import EAGER

START_SECONDS = 1500.0
"""A Ray cluster and several servers that nobody has forked, on a busy machine."""
STOP_SECONDS = 300.0
CLUSTER_TRIES = 5
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
"""Ray Serve's own proxy is given up after 15 s in which it does not answer."""
CONNECTED = (b"Started a local Ray instance", b"Connected to Ray cluster")


@contextmanager
def running(
    arguments: Callable[[int], Sequence[str]], log: Path, end: signal.Signals = signal.SIGTERM
) -> Iterator[str]:
    """Run Python with arguments for a port, from when its address is healthy; yield the URL. ``end``: what ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = _start([sys.executable, *arguments(port)], log)
    started: list[psutil.Process] = []
    try:
        wait_healthy(f"http://127.0.0.1:{port}", process, START_SECONDS)
        started = psutil.Process(process.pid).children(recursive=True)
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        print(log.read_text(errors="replace")[-20_000:])
        raise
    finally:
        process.send_signal(end)
        try:
            assert process.wait(STOP_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    assert psutil.wait_procs(started, timeout=60)[1] == []


def _heed_interrupts() -> None:
    """Undo what a shell does to what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command; again if Ray gives up, which waits for 30 s for a cluster to start, however busy the machine."""
    environment = ENVIRONMENT | PATIENT | os.environ | EAGER | {"PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}"}
    for _ in range(CLUSTER_TRIES):
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                process_group=0,
                preexec_fn=_heed_interrupts,
            )
        while process.poll() is None and not any(sign in log.read_bytes() for sign in CONNECTED):
            time.sleep(0.5)
        if process.poll() is None:
            break
    return process
