"""A vLLM plugin, which vLLM loads into each process of the engine.

It makes the engine hold outputs (see `holding`), lets the engine's processes share cores, and ends them with the
server. vLLM stops its engine when the API process stops in order, but after SIGKILL the engine would run on and keep
the device's memory.
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
"""Environment variable: ``1`` if the engine's processes must not spin while they wait."""
# A hundredth of a decode step. No loss of throughput was measured.
POLL_SECONDS = 1e-5
# vLLM's readers spin for this long after each message.
BUSY_SECONDS = 1.0
RECHECK_MS = 10
SERVER_PID = "DARTS_SERVER_PID"
COUPLED = "darts_coupled"
"""Key in vLLM's ``additional_config``, which reaches all workers: sampling is coupled, see `coupled`."""
SEED = "darts_seed"
"""Name in ``extra_args`` of the seed that a resumed request had at first. Coupled sampling uses it."""
WORKER = "darts_server.vllm.engine_core.worker"
EXTENSION = "WorkerExtension"
COMBINED = f"{EXTENSION} with "
"""Prefix of the name of our extension combined with the user's, which follows with colons instead of dots.

vLLM passes only a name, ``module.attribute``, to its workers.
"""


def prepare_process() -> None:
    """Prepare a process of the engine. vLLM calls this in the server's process too."""
    share_cores()
    end_with_server()
    repair_sampling()

    # Workers do not import the module of the engine.
    engine_module = sys.modules.get("vllm.v1.engine.core")
    if engine_module is not None:
        from darts_server.vllm.engine_core.holding import hold_outputs

        engine_class = engine_module.EngineCoreProc
        for name in ("process_input_sockets", "process_output_sockets"):
            setattr(engine_class, name, _end_engine_on_error(getattr(engine_class, name)))
        hold_outputs(engine_class)


def share_cores() -> None:
    """Let the engine's processes sleep while they wait for each other, if :data:`SHARE_CORES` is set.

    vLLM's processes spin on ``sched_yield`` while they wait. On a machine with few cores, Linux 6.18 then hardly
    schedules other processes: the API process was seen to wait for 13 s.
    """
    if os.environ.get(SHARE_CORES) != "1":
        return
    from vllm.distributed.device_communicators import shm_broadcast

    # The module has imported the function by its name.
    shm_broadcast.sched_yield = lambda: time.sleep(POLL_SECONDS)  # type: ignore[attr-defined]
    spin_condition = getattr(shm_broadcast, "SpinCondition", None)
    if spin_condition is None:
        return
    # A forked engine has our function already, which must not wrap itself.
    vllms_wait = getattr(spin_condition.wait, "__wrapped__", spin_condition.wait)

    @wraps(vllms_wait)
    def wait_for_notification(self: Any, timeout_ms: int | None = None) -> None:
        # Without a busy loop, vLLM's function waits for a notification at once. Polling took a fifth of a core.
        self.busy_loop_s = 0.0
        # vLLM's reader would spin now. Its writer drops notifications while many are sent, so look often.
        if time.monotonic() <= self.last_read + BUSY_SECONDS:
            timeout_ms = RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS)
        vllms_wait(self, timeout_ms)

    spin_condition.wait = wait_for_notification


def _end_engine_on_error(run_thread: Callable[..., None]) -> Callable[..., None]:
    @wraps(run_thread)
    def run_or_end_engine(self: Any, *args: Any) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            run_thread(self, *args)
        except BaseException:
            # Python only prints the exception of a thread. The engine would wait for requests that no thread receives.
            # This message ends the engine's main loop, as if a worker had died.
            self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
            raise

    return run_or_end_engine


def end_engine_with_server() -> None:
    """Let the engine of this process, the server, end with it. Call this before the engine starts."""
    os.environ[SERVER_PID] = str(os.getpid())
    _watch_in_forks()


def end_with_server() -> None:
    """Let a process of the engine end with the server, and a worker also with its engine."""
    server_pid = os.environ.get(SERVER_PID)
    parent = multiprocessing.parent_process()
    if server_pid and int(server_pid) != os.getpid() and parent is not None and parent.pid is not None:
        end_with_process(int(server_pid), parent.pid)
        _watch_in_forks()


# Cached: register once.
@cache
def _watch_in_forks() -> None:
    """Let forks of this process end with the server. vLLM loads no plugins in forks."""

    def end_with_server_and_parent() -> None:
        end_with_process(int(os.environ.get(SERVER_PID) or os.getppid()), os.getppid())

    os.register_at_fork(after_in_child=end_with_server_and_parent)


def end_with_process(*pids: int) -> None:
    """Let this process end when any of the processes ``pids`` ends."""
    # The kernel's ``PR_SET_PDEATHSIG`` would end a process together with the thread that started it, which need not be
    # the parent's main thread.
    try:
        process_handles = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        # A process has ended already.
        os._exit(1)

    def exit_after_any() -> None:
        wait(process_handles)
        # No caller is left, and a log line could block on a pipe without a reader.
        os._exit(1)

    Thread(
        target=exit_after_any,
        name="darts-parent",
        daemon=True,
    ).start()
