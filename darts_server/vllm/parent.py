"""End the engine's processes with the server's, however that ended.

vLLM stops its engine when its API process stops in order. After SIGKILL, as from the kernel when memory runs out, the
engine would run on for good with the device's memory. So each process of the engine waits for the end of the one that
started it: the engine core for that of the server, the workers for that of the engine core.

A thread waits, rather than the kernel's ``PR_SET_PDEATHSIG``: that ends a process together with the thread that started
it, which need not be the parent's main thread.
"""

import multiprocessing
import os
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import wait
from threading import Thread

SERVER_PID = "DARTS_SERVER_PID"
"""Environment variable with the process id of the server, for the processes of its engine."""


def end_engine_with_server() -> None:
    """Let the engine of this process, the server's, end with it. Call this before the engine starts."""
    os.environ[SERVER_PID] = str(os.getpid())
    _watch_forks()


def end_with_parent() -> None:
    """Let this process end with its parent if it is one of a server's engine.

    vLLM calls this in processes that are spawned. Forks of a process that has called it do not call it again.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or os.environ.get(SERVER_PID) in (None, str(os.getpid())):
        return
    end_when_gone(parent.pid, parent.sentinel)
    _watch_forks()


def end_with_process(pid: int) -> None:
    """Let this process end with its parent, which has this id, however that ends."""
    if os.getppid() != pid:
        os._exit(1)  # it has ended already
    end_when_gone(pid)


def end_when_gone(pid: int, sentinel: int | None = None) -> None:
    """Let this process end when another one, whose child it need not be, has ended.

    ``sentinel``: a pipe of the other one, whose end counts too. Forks may keep it open after the end of the process.
    """
    ended = [] if sentinel is None else [sentinel]
    if hasattr(os, "pidfd_open"):  # Linux
        try:
            ended.append(os.pidfd_open(pid))
        except ProcessLookupError:
            os._exit(1)
    if ended:
        Thread(target=_exit_after, args=(ended,), name="darts-parent", daemon=True).start()


@cache
def _watch_forks() -> None:
    """Let forks of this process, and their forks, end with the process that forked them."""
    parent = 0

    def note_parent() -> None:
        nonlocal parent
        parent = os.getpid()

    os.register_at_fork(before=note_parent, after_in_child=lambda: end_when_gone(parent))


def _exit_after(ended: Sequence[int]) -> None:
    wait(ended)
    os._exit(1)  # no caller is left, and a log line could block on a pipe that has no reader
