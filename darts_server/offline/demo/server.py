"""Start and stop a server process, by default on the tiny model. The demo, benchmarks and tests use it.

::

    with serving(DARTS, Path("out/server.log"), "--redundancy", "2") as server:
        httpx.get(f"{server.url}/v1/models")
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any, Protocol

import httpx

MODEL = Path(__file__).parent / "model"
"""The tiny policy: 451,648 parameters (Qwen3), made by ``examples/tiny_rl/warm_start.py``."""
DARTS = ("darts_server", "serve", str(MODEL))
PLAIN = ("vllm.entrypoints.openai.api_server", "--model", str(MODEL))
"""vLLM's own server. ``vllm serve`` itself does not start under the CPU build."""

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "320")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # So small a model gains nothing from more threads, and the server's other processes need the cores.
    "OMP_NUM_THREADS": "1",
    # A worker that is not forked imports vLLM again.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
STARTUP_SECONDS = 300.0
"""Importing vLLM takes half a minute, and several times that from a cold disk."""
GRACE_SECONDS = 30.0
"""vLLM stops within a few seconds."""
POLL_SECONDS = 0.3
PORTS = range(20_000, 30_000)
"""Ports below those that Linux gives to outgoing connections."""
MAX_TRIES = 100
REQUEST_SECONDS = 30.0
"""On a busy machine, a server that starts or stops may take seconds to answer."""
LOG_LINES = 25


class Process(Protocol):
    """The used part of `subprocess.Popen`."""

    pid: int
    returncode: int | Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class Server:
    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def is_healthy(self) -> bool:
        try:
            # `verify=False` saves httpx from reading all root certificates.
            return httpx.get(f"{self.url}/health", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that have these labels; 0 if there are none."""
        text = httpx.get(f"{self.url}/metrics", timeout=REQUEST_SECONDS, verify=False).text
        label_texts = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in text.splitlines():
            # A sample is `NAME{LABELS} VALUE` or `NAME VALUE`.
            is_of_metric = line.startswith((f"{name}{{", f"{name} "))
            if is_of_metric and all(label in line for label in label_texts):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def count_requests(self) -> float:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


Launch = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Runs ``python -m`` with arguments, a file for the output and an environment, in a process group of its own."""


def launch(arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            # Ctrl-C in the terminal does not reach the group; `_stop` ends it in order. A new session would be worse:
            # Linux shares cores among sessions, and a session was seen to wait for up to five seconds at a time.
            process_group=0,
        )


def bind_port(port: int = 0) -> socket.socket:
    """Bind ``port``, or for 0 a free port of `PORTS`."""
    if port:
        return socket.create_server(("127.0.0.1", port))
    # Port 0 would give a port that an outgoing connection may take before the server binds it.
    for candidate in SystemRandom().sample(PORTS, MAX_TRIES):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", candidate))
    raise OSError(f"{MAX_TRIES} ports of {PORTS.start} to {PORTS.stop - 1} are taken")


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    *flags: str,
    port: int = 0,
    env: dict[str, str] | None = None,
    launch: Launch = launch,
    patience: float = STARTUP_SECONDS,
) -> Iterator[Server]:
    """Run a server that is healthy when the block begins.

    Args:
        command: arguments of ``python -m``: `DARTS` or `PLAIN`.
        patience: seconds that the start may take.

    Raises:
        RuntimeError: the server exited or did not become healthy.
    """
    # If the port is taken, this fails. Otherwise the server that listens there would pass for this server.
    with bind_port(port) as free_socket:
        port = int(free_socket.getsockname()[1])
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [*command, *FLAGS, "--host", "127.0.0.1", "--port", str(port), *flags]
    process = launch(arguments, log, ENVIRONMENT | os.environ | (env or {}))
    server = Server(process, port, log)

    # SIGTERM ends the block as Ctrl-C does, so that the server is stopped. A handler that is set already stays.
    is_main = threading.current_thread() is threading.main_thread()
    handles_sigterm = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handles_sigterm:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        deadline = time.monotonic() + patience
        while not server.is_healthy():
            if process.poll() is not None:
                raise RuntimeError(f"the server exited with code {process.returncode}:\n{server.log_tail()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is not healthy after {patience:.0f} s:\n{server.log_tail()}")
            time.sleep(POLL_SECONDS)
        yield server
    finally:
        _stop(process)
        if handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(process: Process) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE_SECONDS)
            return
    # A server that was killed leaves its engine process behind.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
