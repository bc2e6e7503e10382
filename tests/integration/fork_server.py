"""Starts servers, and the workers of a test run, by forking a process that has imported vLLM already.

A server has three processes, and each spends some seven seconds of a core on importing vLLM: two thirds of the cost of
a start. A fork has everything imported. Servers whose processes, signals or exit code a test looks at are started as
users start them, by ``darts_server.offline.demo.server.launch``.

There is one such process for a test run, whatever number of workers it has. It imports vLLM at the first request.
Run as a program with ``-u -c CODE`` this module is a Python whose process is a fork: ``scripts/test`` has
pytest-xdist start its workers with it.
"""

import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn

from darts_server.offline.demo.server import ENVIRONMENT, Process, Server
from darts_server.vllm.fleet.ray_cluster import prepare_cluster

ROOT = Path(__file__).parents[2]
MAX_REQUEST_BYTES = 1 << 20
Serve = Callable[..., AbstractContextManager[Server]]
"""Has the parameters of `darts_server.offline.demo.server.serving`."""
FORKS = "DARTS_TESTS_FORKS"
"""Environment variable with the address of the fork server."""
CODE = ["-u", "-c"]
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""vLLM's sampler compiles its three operations at the first sampled token, which takes longer than most tests."""


class ForkServer:
    """The process to fork from. It ends when this one does.

    ``address``: of its socket, for `Forks`.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = f"{self._folder.name}/forks"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.fork_server", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                cwd=ROOT,
                env=ENVIRONMENT | os.environ | EAGER,
                process_group=0,
            )

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


class Forks:
    """Starts servers through the fork server at ``address``."""

    def __init__(self, address: str) -> None:
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.connect(address)

    def launch(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> Process:
        """Run ``python -m`` with these arguments in a fork."""
        few = ("--num-gpu-blocks-override", "1024")  # to write zeros over the gigabyte of the default takes a second
        with open(os.devnull) as nothing, log.open("wb") as output:
            return self.fork(
                (*arguments, *few), dict(env) | EAGER, [nothing.fileno(), output.fileno(), output.fileno()]
            )

    def fork(self, arguments: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> "ForkedProcess":
        """Run ``python -m`` with these arguments, or ``python`` with ``-u -c CODE``, and standard streams in a fork."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([list(arguments), dict(env)]).encode()
            socket.send_fds(self._requests, [request], [theirs.fileno(), *streams])
        return ForkedProcess(ours)

    def close(self) -> None:
        self._requests.close()


class ForkedProcess:
    """A server that was forked, as `subprocess.Popen` would show it."""

    def __init__(self, status: socket.socket) -> None:
        with status:
            self._status = status.makefile("r")
        self.pid = int(self._status.readline())
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        return self._exit_code(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._exit_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode


def can_fork() -> bool:
    """Whether engines may be forked: CUDA allows no fork once it was initialized."""
    import torch

    return not torch.cuda.is_available()


def serve(listener: socket.socket) -> NoReturn:
    sys.argv = arguments = wait_until_forked(listener)
    if arguments[0] == CODE[0]:
        exec(arguments[-1], {"__name__": "__main__"})
        os._exit(0)  # nothing is left to do, but Triton would list in public what it has not freed
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    sys.exit()


def import_vllm() -> None:
    """Import whatever of vLLM a server and its engine's processes import."""
    prepare_cluster()  # vLLM imports Ray
    import vllm.entrypoints.openai.api_server
    import vllm.envs
    import vllm.model_executor.models.qwen3
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor  # noqa: F401  # loaded before the forks

    os.register_at_fork(after_in_child=forget_signals)
    prepare_to_fork()


def import_server() -> None:
    """Import the rest of a server, which workers of a test run have not imported when they begin to measure coverage.

    Make vLLM fork the engine's processes too.
    """
    import vllm.envs
    import vllm.v1.worker.cpu_worker
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    import darts_server.app
    import darts_server.vllm.api.server
    import darts_server.vllm.engine_core.worker  # noqa: F401  # loaded before the forks

    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"  # its CPU platform sets spawn
    SpinCondition.record_read = turn_for_a_moment  # type: ignore[method-assign]
    prepare_to_fork()


def turn_for_a_moment(condition: Any) -> None:
    """Look for the next message for 50 ms after each, and then sleep until it comes: vLLM does so for a second.

    Idle engines of several fleets took a third of two cores with that.
    """
    condition.last_read = time.monotonic() - condition.busy_loop_s + 0.05


def prepare_to_fork() -> None:
    assert threading.active_count() == 1, "a lock that another thread holds would stay locked in every fork"
    gc.freeze()  # collections in the forks would otherwise copy all memory that they share


def forget_signals() -> None:
    """Undo what a fork inherits and a new process does not have.

    With the descriptor that wakes uvloop up, a signal to the engine would arrive in the server as well.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until_forked(listener: socket.socket) -> list[str]:
    """Fork at each request; return in the fork, with the arguments of the request."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:  # closed: the test run has ended
                    wait_for_children()
                    os._exit(0)
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif (arguments := fork_at_request(key.fileobj, selector)) is not None:
                    return arguments


def fork_at_request(requests: Any, selector: selectors.BaseSelector) -> list[str] | None:
    """Read a request and fork; return its arguments in the fork, and ``None`` in the process that goes on."""
    request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 4)
    if not request:
        selector.unregister(requests)
        requests.close()
        return None
    arguments, env = json.loads(request)
    if "vllm" not in sys.modules:
        import_vllm()
    if arguments[0] != CODE[0] and "darts_server.app" not in sys.modules:
        import_server()
    if os.fork() == 0:
        for key in list(selector.get_map().values()):
            if key.fileobj is not sys.stdin:
                key.fileobj.close()  # type: ignore[union-attr]  # sockets all
        report_exit_code(descriptors[0])
        become(descriptors[1:], env)
        return list(arguments)
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def wait_for_children() -> None:
    """Collect the servers, all of which have been stopped, so that their CPU time counts in that of the tests."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def report_exit_code(status: int) -> None:
    """Fork again and return in the fork; write its process id, wait for its end, write its exit code, and exit."""
    if (pid := os.fork()) == 0:
        os.close(status)
        return
    os.write(status, f"{pid}\n".encode())
    _, ended = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # whoever started it may have ended
        os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def become(streams: Sequence[int], env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}  # it has been read already
    os.environ.clear()
    os.environ.update(of_ray | dict(env))


if __name__ == "__main__":
    if sys.argv[1:3] == CODE:
        sys.exit(Forks(os.environ[FORKS]).fork(sys.argv[1:], os.environ, (0, 1, 2)).wait())
    serve(socket.socket(fileno=int(sys.argv[1])))
