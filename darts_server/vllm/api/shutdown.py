"""Shuts the server down: after a signal, or because the engine is dead or hung."""

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from darts_server.exceptions import EngineDead, ServerStopping
from darts_server.serving.lifecycle import ANSWER_SECONDS, HAND_BACK_SECONDS, Lifecycle
from darts_server.vllm.api.engine import VllmBatches
from darts_server.vllm.api.llm import ShapingLLM

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
GRACE_SECONDS = 30.0
CHILD_GRACE_SECONDS = 5.0
"""For the engine's processes to end, when no caller waits for them."""
CONNECTION_SECONDS = 5
"""For answers to reach slow readers, after everything else has ended."""
RETRY_SECONDS = 30
"""``Retry-After`` of a stopping server: another server starts in about that time."""
STATE_LOST = 3
"""Exit code of a server that could not save carried prompts or learned state."""
POLL_SECONDS = 0.05
MAX_WATCH_SECONDS = 5.0
MIN_WATCHES = 10


def set_grace_seconds(args: Namespace, grace: float | None) -> float:
    """Return the grace time, by default vLLM's ``--shutdown-timeout``, and make vLLM's timeout longer."""
    seconds = grace if grace is not None else float(args.shutdown_timeout or GRACE_SECONDS)
    # A signal to the process group reaches the engine too, which must run until work was handed back.
    args.shutdown_timeout = math.ceil(seconds + HAND_BACK_SECONDS)
    return seconds


def exit_on_signals() -> None:
    """Exit at once on a signal, until `Shutdown` replaces these handlers."""
    for number in SIGNALS:
        signal.signal(number, exit_at_once)
    # A forked engine would share the descriptor that wakes the event loop, so its signals would arrive here too.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    # SIGHUP reloads keys. It must not end a server without keys, nor the engine's processes, which inherit this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # SIGUSR1 writes the stacks of all threads to standard error, even while the event loop is blocked.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def handle_sighup(reload: Callable[[], None] | None) -> None:
    # The engine must have started: its processes inherit ignored signals, but not handled signals.
    ignore = partial(logger.warning, "SIGHUP: ignored, since the server has no key files to reload")
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload or ignore)


def exit_at_once(number: int, _: object = None) -> None:
    """End the engine's processes, and exit with the signal's code."""
    children = multiprocessing.active_children()
    workers: list[psutil.Process] = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            workers += psutil.Process(child.pid).children(recursive=True)
        # An engine that can still end in order removes its shared memory.
        child.terminate()
    for child in children:
        child.join(CHILD_GRACE_SECONDS)
        child.kill()
    # Workers outlive a killed engine, and may take minutes to notice.
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    # vLLM waits for its engine in a call that swallows the exceptions of signal handlers.
    os._exit(128 + number)


@dataclass(slots=True, eq=False)
class Shutdown:
    """Lets running work finish within ``grace`` seconds, hands back or fails the rest, and exits.

    ``watchdog``: seconds that an engine with requests may send nothing; 0 for no limit.
    """

    lifecycle: Lifecycle
    llm: ShapingLLM
    batches: VllmBatches
    grace: float
    watchdog: float = 0.0

    @asynccontextmanager
    async def watch(self, exit: Callable[[], None]) -> AsyncIterator[None]:
        """Watch the engine in the block. ``exit``: called when all work has ended, to stop the HTTP server."""
        self.llm.on_death = lambda: self.lifecycle.stop(
            EngineDead(f"the engine died: {cause_of_death(self.llm.engine_core)}")
        )
        tasks = [asyncio.create_task(self.run(exit))]
        if self.watchdog:
            tasks.append(asyncio.create_task(self.watch_engine()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def watch_engine(self) -> None:
        """Stop the server when the engine should send something and is silent."""
        interval = min(MAX_WATCH_SECONDS, self.watchdog / MIN_WATCHES)
        # Polls are counted, not seconds: while this process is stopped or starved, no time counts.
        silent_seconds = 0.0
        while silent_seconds < self.watchdog:
            messages_before = self.llm.held_requests.received_messages
            await asyncio.sleep(interval)
            if self.llm.should_respond and self.llm.held_requests.received_messages == messages_before:
                silent_seconds += interval
            else:
                silent_seconds = 0.0
        self.lifecycle.stop(
            EngineDead(
                f"the engine is hung: it has requests, and sent nothing for {self.watchdog:g} s (--engine-watchdog)"
            )
        )

    def handle_signals(self) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.handle_signal, number)

    def handle_signal(self, number: int) -> None:
        """Begin the shutdown, or exit at once if it has begun."""
        name = signal.Signals(number).name
        if self.lifecycle.stop_reason is not None:
            logger.warning("%s again: exiting at once", name)
            exit_at_once(number)
        logger.warning("%s: shutting down; running requests may take the grace time, another signal ends them", name)
        self.lifecycle.stop(
            ServerStopping("the server is stopping; send this request to another server, or retry later", RETRY_SECONDS)
        )
        self.batches.drain()
        if self.llm.rollouts is not None:
            self.llm.rollouts.joiner.drain()

    async def run(self, exit: Callable[[], None]) -> None:
        """Wait for a reason to stop, end all work, and call ``exit``."""
        reason = await self.lifecycle.wait_for_stop()
        # A dead engine finishes nothing.
        if isinstance(reason, ServerStopping) and not await self._wait_until_idle(self.grace):
            try:
                async with asyncio.timeout(HAND_BACK_SECONDS):
                    await asyncio.gather(self.llm.hand_back(), self.batches.hand_back(reason))
            except Exception:
                # The work fails below, like all other work.
                logger.exception("running work could not be handed back")
        if not await self._wait_until_idle(seconds=0.0):
            self.batches.fail(reason)
            self.llm.fail(reason)
            # Wait until callers have their errors.
            await self._wait_until_idle(ANSWER_SECONDS)
        self.llm.end_sessions(reason)
        exit()

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Wait until no caller waits for work. Return False after ``seconds``."""
        # Time is counted in polls, as in `watch_engine`.
        while self.llm.admission.unanswered_requests > 0 or self.lifecycle.requests > 0:
            if seconds <= 0:
                return False
            await asyncio.sleep(POLL_SECONDS)
            seconds -= POLL_SECONDS
        return True


def exit_code(llm: ShapingLLM, lifecycle: Lifecycle, lost_prompts: int) -> int:
    """Return the exit code, and log its reason. ``lost_prompts``: carried prompts that could not be saved."""
    reason = lifecycle.stop_reason
    if not isinstance(reason, ServerStopping) and (reason or llm.died):
        logger.critical("%s", reason or f"the engine died: {cause_of_death(llm.engine_core)}")
        return 1
    if lost_prompts:
        logger.critical("%d prompts that were carried over could not be saved: send them again", lost_prompts)
        return STATE_LOST
    return 0


def cause_of_death(engine_core: Any) -> str:
    # Engines on other machines have no manager here.
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
