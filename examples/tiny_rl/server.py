"""Server processes on the tiny model, for the demo, the benchmarks and the tests.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny_rl" / "model"
DARTS = ("darts_server", "serve", str(MODEL))
PLAIN = ("vllm.entrypoints.openai.api_server", "--model", str(MODEL))
"""vLLM's own server; ``vllm serve`` itself does not start under the CPU build."""

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "320")
# One thread: so small a model gains nothing from more, and the server's other processes need the cores.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
STARTUP_SECONDS = 300.0  # vLLM's imports take half a minute, several times that from a cold disk
GRACE_SECONDS = 30.0  # vLLM ends within a few seconds
LOG_LINES = 25


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def metric(self, name: str, **labels: str) -> float:
        """Sum of those samples of a metric that carry these labels; 0 if there are none."""
        text = httpx.get(f"{self.url}/metrics").text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted))

    def busy(self) -> float:
        """Requests that the engine runs or keeps waiting."""
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


@contextmanager
def serving(
    command: Sequence[str], log: Path, *flags: str, port: int = 0, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server that is healthy when the block begins and gone when it ends, also by SIGTERM to this process.

    Args:
        command: what to run with ``python -m``, :data:`DARTS` or :data:`PLAIN`.
        log: where its output goes.
        port: 0 for a free one.

    Raises:
        RuntimeError: it exited or did not become healthy; the message has the end of its log.
    """
    with socket.create_server(("127.0.0.1", port)) as free:  # fails if another server is there, which would answer us
        port = int(free.getsockname()[1])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *FLAGS, "--host", "127.0.0.1", "--port", str(port), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=ENVIRONMENT | os.environ | (env or {}),
            start_new_session=True,  # the terminal's Ctrl-C does not reach it: it is stopped here, in order
        )
    server = Server(process, port, log)
    with _unwound_by_sigterm():
        try:
            _wait_until(server, lambda: httpx.get(f"{server.url}/health").status_code == 200)
            yield server
        finally:
            _stop(process)


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what was started in it is stopped; unless it means something."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait_until(server: Server, healthy: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server exited with code {server.process.returncode}:\n{server.last_words()}")
        with suppress(httpx.TransportError):
            if healthy():
                return
        time.sleep(0.3)
    raise RuntimeError(f"the server is not healthy after {STARTUP_SECONDS:.0f} s:\n{server.last_words()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE_SECONDS)
            return
    with suppress(ProcessLookupError):  # a server that was killed leaves its engine behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
