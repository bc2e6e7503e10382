"""A vLLM plugin, loaded into each process of the engine: this package's entry point ``vllm.general_plugins``."""

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from darts_server.vllm.parent import end_with_parent

SHARE_CORES = "DARTS_ENGINE_SHARES_CORES"
"""Environment variable that the server sets to ``1`` if the engine's processes must not spin while they wait."""

POLL_SECONDS = 1e-5
"""A hundredth of a decode step; no loss of throughput was measured."""
RECHECK_MS = 10
"""How often a reader looks for a message in the `BUSY_SECONDS` after the last one, should a notification be lost."""
BUSY_SECONDS = 1.0
"""How long vLLM spins after a message; it relies on notifications only after that."""


def prepare_process() -> None:
    """Prepare a process of the engine. vLLM calls this in the server's process too."""
    share_cores()
    end_with_parent()
    end_with_threads()


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
    if (reader := getattr(shm_broadcast, "SpinCondition", None)) is not None:
        reader.wait = _notified(getattr(reader.wait, "__wrapped__", reader.wait))


def _notified(wait: Callable[..., None]) -> Callable[..., None]:
    """Let a reader wait for the notification of a message from the start. Polling took a fifth of a core."""

    @wraps(wait)
    def wait_for_notification(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = 0.0
        if time.monotonic() <= self.last_read + BUSY_SECONDS:
            timeout_ms = RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS)
        wait(self, timeout_ms)

    return wait_for_notification


ENGINE = "vllm.v1.engine.core"
SOCKET_THREADS = ("process_input_sockets", "process_output_sockets")
"""What the threads run that receive the engine's requests and send its outputs."""


def end_with_threads() -> None:
    """End the engine if a thread of its sockets ends with an exception.

    Python prints the exception and goes on, so the engine would wait for requests that no thread receives any more.
    """
    if (engine := sys.modules.get(ENGINE)) is None:  # a worker's process
        return
    for name in SOCKET_THREADS:
        setattr(engine.EngineCoreProc, name, _fatal(getattr(engine.EngineCoreProc, name)))


def _fatal(run: Callable[..., None]) -> Callable[..., None]:
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
