"""How a server on vLLM's engine shuts down: after a signal, or because the engine is dead or hung."""

import asyncio
import faulthandler
import logging
import math
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import psutil

from darts_server.exceptions import EngineDead, ServerStopping
from darts_server.serving.lifecycle import ANSWER_SECONDS, HAND_BACK_SECONDS, Lifecycle
from darts_server.vllm.api.engine import VllmBatches
from darts_server.vllm.api.llm import ShapingLLM

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
CHILD_GRACE_SECONDS = 5.0  # no caller waits any more for what an engine could still finish
GRACE_SECONDS = 30.0
STATE_LOST = 3
"""Exit code of a server that ended in order, but could not save all prompts that it had promised to keep, or what it
had learned last."""
POLL_SECONDS = 0.05
MAX_WATCH_SECONDS = 5.0
MIN_WATCHES = 10  # how often the watchdog looks at the engine, within its time limit
CONNECTION_SECONDS = 5  # for answers to reach slow readers after everything else has ended
RETRY_SECONDS = 30  # ``Retry-After`` of a stopping server: about the time in which another one starts


def set_grace_seconds(args: Namespace, grace: float | None) -> float:
    """Choose the grace time, ours before vLLM's ``--shutdown-timeout``, and set the latter to what callers wait.

    A signal that is sent to the process group reaches the engine too, which then runs on until work was handed back.
    """
    seconds = grace if grace is not None else float(args.shutdown_timeout or GRACE_SECONDS)
    args.shutdown_timeout = math.ceil(seconds + HAND_BACK_SECONDS)
    return seconds


def exit_on_signals() -> None:
    """Exit at once on a signal, until `Shutdown` has replaced these handlers.

    SIGHUP is ignored, also by the processes that the engine starts: it reloads keys, see `handle_sighup`, and must not
    end a server that has none to reload. SIGUSR1 writes the stacks of all threads to standard error, also while the
    event loop stands still.
    """
    for number in SIGNALS:
        signal.signal(number, exit_at_once)
    # A forked engine would share the descriptor that wakes the event loop up: the signal that ends it would arrive here
    # too, as a second one.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def handle_sighup(reload: Callable[[], None] | None) -> None:
    """Call ``reload`` on SIGHUP. Without one, log that there is nothing to reload.

    Call this after the engine has started: its processes inherit an ignored signal, but not a handled one.
    """
    ignore = partial(logger.warning, "SIGHUP: ignored, since the server has no key files to reload")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload or ignore)


def exit_at_once(number: int, _: object = None) -> None:
    """End the engine's processes and exit, while the engine starts or on a second signal.

    vLLM waits for its engine in a call that swallows what a signal handler raises, so only `os._exit` works. An engine
    that can still end in order removes its shared memory.
    """
    children, workers = multiprocessing.active_children(), list[psutil.Process]()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            workers += psutil.Process(child.pid).children(recursive=True)
        child.terminate()
    for child in children:
        child.join(CHILD_GRACE_SECONDS)
        child.kill()
    for worker in workers:  # they outlive a killed engine, and may take minutes to notice
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    os._exit(128 + number)


class Shutdown:
    """Drain running work after a stop, hand back what has not ended, fail what is left, and exit.

    Args:
        batches: what runs on the engine beside requests of vLLM's routes.
        grace: seconds that running work may take after a stop by signal.
        watchdog: seconds that an engine with requests may send nothing; 0 for any.
    """

    def __init__(
        self, lifecycle: Lifecycle, llm: ShapingLLM, batches: VllmBatches, grace: float, watchdog: float = 0.0
    ) -> None:
        self._lifecycle, self._llm, self._batches = lifecycle, llm, batches
        self._grace, self._watchdog = grace, watchdog

    @asynccontextmanager
    async def watch(self, exit: Callable[[], None]) -> AsyncIterator[None]:
        """Watch the engine, and call ``exit``, which stops the HTTP server, when the server has stopped."""
        self._llm.on_death = lambda: self._lifecycle.stop(
            EngineDead(f"the engine died: {cause_of_death(self._llm.engine_core)}")
        )
        tasks = [asyncio.create_task(self.run(exit))]
        if self._watchdog:
            tasks.append(asyncio.create_task(self.watch_engine()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def watch_engine(self) -> None:
        """Stop the server when the engine has sent nothing for the watchdog's seconds in which it should have.

        Polls are counted rather than read from a clock: time in which this process did not run, because it was stopped
        or starved, does not count.
        """
        llm, limit, silent = self._llm, self._watchdog, 0.0
        interval = min(MAX_WATCH_SECONDS, limit / MIN_WATCHES)
        while silent < limit:
            before = llm.held.messages
            await asyncio.sleep(interval)
            silent = silent + interval if llm.should_respond and llm.held.messages == before else 0.0
        what = f"it has requests, and sent nothing for {limit:g} s (--engine-watchdog)"
        self._lifecycle.stop(EngineDead(f"the engine is hung: {what}"))

    async def handle_signals(self) -> None:
        """Shut down in order on the first signal and at once on the second. vLLM's own handlers know no groups."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.handle_signal, number)

    def handle_signal(self, number: int) -> None:
        """Accept no more work, and drain; the second time exit."""
        name = signal.Signals(number).name
        if self._lifecycle.stop_reason is not None:
            logger.warning("%s again: exiting at once", name)
            exit_at_once(number)
        logger.warning("%s: shutting down; running requests may take the grace time, another signal ends them", name)
        self._lifecycle.stop(
            ServerStopping("the server is stopping; send this to another one, or retry later", RETRY_SECONDS)
        )
        self._batches.drain()
        if self._llm.rollouts is not None:
            self._llm.rollouts.joiner.drain()

    async def run(self, exit: Callable[[], None]) -> None:
        """Wait for the stop, give running work its grace time, hand it back or fail it, and exit."""
        reason = await self._lifecycle.wait_for_stop()
        if isinstance(reason, ServerStopping) and await self._is_busy_after(self._grace):
            try:
                async with asyncio.timeout(HAND_BACK_SECONDS):
                    await asyncio.gather(self._llm.hand_back(), self._batches.hand_back(reason))
            except Exception:  # it fails then, as other work does
                logger.exception("running work could not be handed back")
        if await self._is_busy_after(0.0):
            self._batches.fail(reason)
            self._llm.fail(reason)
            await self._is_busy_after(ANSWER_SECONDS)
        exit()

    async def _is_busy_after(self, remaining: float) -> bool:
        """Wait until no caller waits for running work, but so many seconds at most; return whether any still does."""
        while (is_busy := self._llm.admission.requests > 0 or self._lifecycle.requests > 0) and remaining > 0:
            await asyncio.sleep(POLL_SECONDS)
            remaining -= POLL_SECONDS
        return is_busy


def exit_code(llm: ShapingLLM, lifecycle: Lifecycle, lost: int = 0) -> int:
    """1 if the engine failed, `STATE_LOST` if it did not; the last line of the log then says why.

    ``lost``: prompts that were to be kept for the next server, and could not be.
    """
    if isinstance(lifecycle.stop_reason, ServerStopping) or not (lifecycle.stop_reason or llm.died):
        if lost:
            logger.critical("%d prompts that were carried over could not be saved: send them again", lost)
        return STATE_LOST if lost else 0
    logger.critical("%s", lifecycle.stop_reason or f"the engine died: {cause_of_death(llm.engine_core)}")
    return 1


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
