"""A vLLM plugin, loaded into each process of the engine: this package's entry point ``vllm.general_plugins``.

It lets the engine hold what is not read yet (see `holding`), and lets these processes share cores, and
end with the server's, however that ended. vLLM stops its engine when its API process stops in order. After SIGKILL, as
from the kernel when memory runs out, the engine would run on for good with the device's memory.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

from darts_server.vllm.engine_core.cpu_sampling import repair_sampling

SHARE_CORES = "DARTS_ENGINE_SHARES_CORES"
"""Environment variable that the server sets to ``1`` if the engine's processes must not spin while they wait."""

POLL_SECONDS = 1e-5  # a hundredth of a decode step; no loss of throughput was measured
RECHECK_MS = 10
"""How often a reader looks for a message in the `BUSY_SECONDS` after the last one, should a notification be lost."""
BUSY_SECONDS = 1.0  # how long vLLM spins after a message; it relies on notifications only after that
SERVER_PID = "DARTS_SERVER_PID"
"""Environment variable with the process id of the server, for the processes of its engine."""
WORKER = "darts_server.vllm.engine_core.worker"
EXTENSION = "WorkerExtension"
COMBINED = f"{EXTENSION} with "
"""Prefix of the name of our extension combined with the user's, whose name follows with colons instead of dots.

vLLM passes only a name to its workers, ``module.attribute``, so both extensions have to be in the attribute. The
worker module builds the combined class when vLLM looks the attribute up.
"""


def prepare_process() -> None:
    """Prepare a process of the engine. vLLM calls this in the server's process too."""
    share_cores()
    end_with_server()
    repair_sampling()
    if (engine := sys.modules.get("vllm.v1.engine.core")) is not None:  # not a worker's process
        from darts_server.vllm.engine_core.holding import hold_outputs

        # What the threads run that receive the engine's requests and send its outputs.
        for name in ("process_input_sockets", "process_output_sockets"):
            setattr(engine.EngineCoreProc, name, _fatal(getattr(engine.EngineCoreProc, name)))
        hold_outputs(engine.EngineCoreProc)


def share_cores() -> None:
    """Let the engine's processes sleep while they wait for each other, if :data:`SHARE_CORES` is set.

    vLLM's processes spin on ``sched_yield`` while they wait, readers of messages for a second after each. On a machine
    with few cores, Linux 6.18 then hardly schedules other processes: the API process was seen to wait for 13 s, in
    which all candidates that it should have stopped ran to their end.
    """
    if os.environ.get(SHARE_CORES) != "1":
        return
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(POLL_SECONDS)  # type: ignore[attr-defined]  # it imports it
    if (reader := getattr(shm_broadcast, "SpinCondition", None)) is None:
        return
    vllms = getattr(reader.wait, "__wrapped__", reader.wait)

    @wraps(vllms)
    def wait_for_notification(self: Any, timeout_ms: int | None = None) -> None:
        """Wait for the notification of a message from the start. Polling took a fifth of a core."""
        self.busy_loop_s = 0.0
        if time.monotonic() <= self.last_read + BUSY_SECONDS:
            timeout_ms = RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS)
        vllms(self, timeout_ms)

    reader.wait = wait_for_notification


def _fatal(run: Callable[..., None]) -> Callable[..., None]:
    """End the engine if this thread of its sockets ends with an exception.

    Python prints the exception and goes on, so the engine would wait for requests that no thread receives any more.
    """

    @wraps(run)
    def run_or_fail(self: Any, *args: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            run(self, *args)
        except BaseException:
            # Ends the engine's main loop, whatever it is doing, as if a worker had died.
            self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
            raise

    return run_or_fail


def end_engine_with_server() -> None:
    """Let the engine of this process, the server's, end with it. Call this before the engine starts."""
    os.environ[SERVER_PID] = str(os.getpid())
    _watch_in_forks()


def end_with_server() -> None:
    """Let this process end with the server if it is one of its engine. vLLM calls this where it spawns processes.

    And with its parent: a worker must not keep the device's memory when the engine was killed.
    """
    server, parent = os.environ.get(SERVER_PID), multiprocessing.parent_process()
    if server and int(server) != os.getpid() and parent is not None and parent.pid is not None:
        end_with_process(int(server), parent.pid)
        _watch_in_forks()


@cache
def _watch_in_forks() -> None:
    """Let forks of this process, and their forks, end with the server. vLLM loads no plugins there."""

    def end_with_both() -> None:
        end_with_process(int(os.environ.get(SERVER_PID) or os.getppid()), os.getppid())

    os.register_at_fork(after_in_child=end_with_both)


def end_with_process(*pids: int) -> None:
    """Let this process end when one of others, whose child it need not be, has ended.

    A thread waits, rather than the kernel's ``PR_SET_PDEATHSIG``: that ends a process together with the thread that
    started it, which need not be the parent's main thread.
    """
    try:
        processes = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        os._exit(1)

    def exit_after_end() -> None:
        wait(processes)
        os._exit(1)  # no caller is left, and a log line could block on a pipe that has no reader

    Thread(target=exit_after_end, name="darts-parent", daemon=True).start()
