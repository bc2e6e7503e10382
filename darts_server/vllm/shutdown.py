"""How a server on vLLM's engine shuts down: after a signal, or because the engine is dead or hung."""

import asyncio
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from fastapi import FastAPI

from darts_server.exceptions import DartsError, EngineDead, EngineHung, ServerStopping
from darts_server.serving.lifecycle import HAND_BACK_SECONDS, Drainable, Lifecycle, Shutdown
from darts_server.vllm.llm import ShapingLLM

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
CHILD_GRACE_SECONDS = 5.0  # no caller waits any more for what an engine could still finish
GRACE_SECONDS = 30.0
PROMPTS_LOST = 3
"""Exit code of a server that ended in order, but could not save all prompts that it had promised to keep."""
MAX_POLL_SECONDS = 5.0
MIN_POLLS = 10
"""Of the watchdog, within its time limit."""
CONNECTION_SECONDS = 5
"""For answers to reach slow readers after everything else has ended."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """When a server ends.

    ``grace``: seconds that running work may take after a signal. ``watchdog``: seconds that an engine with requests may
    send nothing; 0 switches the watchdog off.
    """

    lifecycle: Lifecycle
    grace: float
    watchdog: float = 300.0


def set_grace_seconds(args: Namespace, grace: float | None) -> float:
    """Choose the grace time, ours before vLLM's ``--shutdown-timeout``, and set the latter to what callers wait.

    A signal that is sent to the process group reaches the engine too, which then runs on until work was handed back.
    """
    seconds = grace if grace is not None else float(args.shutdown_timeout or GRACE_SECONDS)
    args.shutdown_timeout = math.ceil(seconds + HAND_BACK_SECONDS)
    return seconds


def exit_on_signals() -> None:
    """Exit at once on a signal, until `supervise` has replaced these handlers.

    SIGHUP is ignored, also by the processes that the engine starts: it reloads keys, see `handle_sighup`, and must not
    end a server that has none to reload. SIGUSR1 writes the stacks of all threads to standard error, also while the
    event loop stands still.
    """
    for number in SIGNALS:
        signal.signal(number, exit_at_once)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def handle_sighup(reload: Callable[[], None] | None) -> None:
    """Call ``reload`` on SIGHUP. Without one, log that there is nothing to reload.

    Call this after the engine has started: its processes inherit an ignored signal, but not a handled one.
    """
    ignore = partial(logger.warning, "SIGHUP: ignored, since the server has no key files to reload")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload or ignore)


@asynccontextmanager
async def supervise(
    llm: ShapingLLM, work: Sequence[Drainable], application: FastAPI, supervision: Supervision
) -> AsyncIterator[Shutdown]:
    """Watch the engine, and shut the HTTP server down when the server stops.

    ``work``: what else runs on the engine.
    """

    lifecycle, limit = supervision.lifecycle, supervision.watchdog

    def stop_http_server() -> None:
        application.state.server.should_exit = True

    def report_death() -> None:
        lifecycle.stop(EngineDead(f"the engine died: {cause_of_death(llm.engine_core)}"))

    async def watch() -> None:
        await wait_until_hung(llm, limit)
        silent = f"it has requests, and sent nothing for {limit:g} s (--engine-watchdog)"
        lifecycle.stop(EngineHung(f"the engine is hung: {silent}"))

    shutdown = Shutdown(lifecycle, _EngineWork(llm, work), supervision.grace, stop_http_server)
    llm.on_death = report_death
    tasks = [asyncio.create_task(each) for each in (shutdown.run(), *([watch()] if limit else []))]
    try:
        yield shutdown
    finally:
        for task in tasks:
            task.cancel()


def handle_signals(shutdown: Shutdown, lifecycle: Lifecycle) -> None:
    """Shut down in order on the first signal and at once on the second. vLLM's own handlers know no groups."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, partial(_handle_signal, number, shutdown, lifecycle))


def exit_at_once(number: int, _: object = None) -> None:
    """Kill the engine's processes and exit, while the engine starts or on a second signal.

    vLLM waits for its engine in a call that swallows what a signal handler raises, so only `os._exit` works.
    """
    children = multiprocessing.active_children()
    workers: list[psutil.Process] = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            workers += psutil.Process(child.pid).children(recursive=True)
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_GRACE_SECONDS)
        child.kill()
    for worker in workers:  # they outlive a killed engine, and may take minutes to notice
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    os._exit(128 + number)


def exit_code(llm: ShapingLLM, lifecycle: Lifecycle, lost: int = 0) -> int:
    """1 if the engine failed, `PROMPTS_LOST` if it did not; the last line of the log then says why.

    ``lost``: prompts that were to be kept for the next server, and could not be.
    """
    if isinstance(lifecycle.stop_reason, ServerStopping) or not (lifecycle.stop_reason or llm.died):
        if lost:
            logger.critical("%d prompts that were carried over could not be saved: send them again", lost)
        return PROMPTS_LOST if lost else 0
    logger.critical("%s", lifecycle.stop_reason or f"the engine died: {cause_of_death(llm.engine_core)}")
    return 1


class _EngineWork:
    """Implements :class:`darts_server.serving.lifecycle.RunningWork`."""

    def __init__(self, llm: ShapingLLM, work: Sequence[Drainable]) -> None:
        self._llm = llm
        self._work = work

    @property
    def is_busy(self) -> bool:
        return self._llm.admission.requests > 0

    def drain(self) -> None:
        for work in self._work:
            work.drain()
        if self._llm.rollouts is not None:
            self._llm.rollouts.joiner.drain()

    async def hand_back(self, reason: DartsError) -> None:
        await asyncio.gather(self._llm.hand_back(), *(work.hand_back(reason) for work in self._work))

    def fail(self, error: DartsError) -> None:
        for work in self._work:
            work.fail(error)
        self._llm.fail(error)


async def wait_until_hung(llm: ShapingLLM, limit: float) -> None:
    """Return when the engine has sent nothing for ``limit`` seconds in which it should have.

    Polls are counted rather than read from a clock: time in which this process did not run, because it was stopped or
    starved, does not count.
    """
    interval, silent = min(MAX_POLL_SECONDS, limit / MIN_POLLS), 0.0
    while silent < limit:
        llm.has_sent = False
        await asyncio.sleep(interval)
        silent = silent + interval if llm.should_respond and not llm.has_sent else 0.0


def cause_of_death(engine_core: Any) -> str:
    """Describe what ended the engine's process, as far as its exit code shows."""
    manager = getattr(engine_core.resources, "engine_manager", None)
    codes = {} if manager is None else manager.finished_procs()
    for name, code in codes.items():
        if code == -signal.SIGKILL:
            return f"{name} was killed (SIGKILL), most often because the machine has no memory left"
        if code < 0:
            return f"{name} was ended by {signal.Signals(-code).name}"
        if code > 0:
            return f"{name} ended with exit code {code}; its own error is further up in the log"
    return "its own error is further up in the log"


def _handle_signal(number: int, shutdown: Shutdown, lifecycle: Lifecycle) -> None:
    if lifecycle.stop_reason is not None:
        logger.warning("%s again: exiting at once", signal.Signals(number).name)
        exit_at_once(number)
    logger.warning(
        "%s: shutting down; running requests may take the grace time, another signal ends them",
        signal.Signals(number).name,
    )
    shutdown.begin()
