"""How a server on vLLM's engine ends: signals, a dead engine, a hung one."""

import asyncio
import logging
import math
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import psutil
from fastapi import FastAPI

from darts_server.exceptions import DartsError, EngineDead, EngineHung, ServerStopping
from darts_server.serving.lifecycle import Ending, Life
from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.watchdog import cause_of_death, hung

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CHILD_GRACE_SECONDS = 5.0  # nobody waits any more for what an engine is still to finish
GRACE_SECONDS = 30.0
CONNECTION_SECONDS = 5
"""For answers to reach slow readers after all else has ended."""


@dataclass(frozen=True, slots=True)
class Living:
    """``grace``: seconds that what runs may take when the server is told to stop; ``None``: vLLM's own setting, or 30.
    ``watchdog``: seconds that an engine with work may say nothing; 0 for any time. ``hurry``, ``fail``: for work that
    is more than the engine's groups.
    """

    grace: float | None = None
    watchdog: float = 300.0
    life: Life = field(default_factory=Life)
    hurry: Callable[[], None] = lambda: None
    fail: Callable[[DartsError], None] = lambda _: None


def settle_grace(args: Namespace, grace: float | None) -> float:
    """The grace time by our flag or by vLLM's ``--shutdown-timeout``, which is set to the same.

    Where a signal reaches all processes, the engine then goes on for as long as there is someone to tell.
    """
    seconds = grace if grace is not None else float(args.shutdown_timeout or GRACE_SECONDS)
    args.shutdown_timeout = math.ceil(seconds)
    return seconds


@asynccontextmanager
async def watched(llm: ShapingLLM, application: FastAPI, living: Living, grace: float) -> AsyncIterator[Ending]:
    """What ends the server is seen until the block ends."""

    def leave() -> None:
        application.state.server.should_exit = True

    def died() -> None:
        living.life.end(EngineDead(f"the engine died: {cause_of_death(llm.engine_core)}"))

    ending = Ending(living.life, _EngineWork(llm, living), grace, leave)
    llm.pulse.died = died
    tasks = [asyncio.create_task(ending.run())]
    if living.watchdog:
        tasks.append(asyncio.create_task(_watch(llm, living)))
    try:
        yield ending
    finally:
        for task in tasks:
            task.cancel()


def take_signals(ending: Ending, life: Life) -> None:
    """Stop in order at the first signal, at once at the second. vLLM's own handlers know of no groups."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, partial(_signalled, number, ending, life))


def leave_at_once(number: int, _: object = None) -> None:
    """Told to stop while the engine starts, or a second time.

    vLLM waits for its engine in a call that swallows what a signal handler raises, so nothing short of leaving works.
    """
    children = multiprocessing.active_children()
    workers = [worker for child in children for worker in _descendants(child.pid)]
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_GRACE_SECONDS)
        child.kill()
    for worker in workers:  # an engine that was killed leaves them behind, and they may take minutes to notice
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    os._exit(128 + number)


def exit_code(llm: ShapingLLM, life: Life) -> int:
    """1 if the engine failed, and then the last line of the log says why."""
    if isinstance(life.over, ServerStopping) or not (life.over or llm.died):
        return 0
    logger.critical("%s", life.over or f"the engine died: {cause_of_death(llm.engine_core)}")
    return 1


class _EngineWork:
    """Implements :class:`darts_server.serving.lifecycle.Work`."""

    def __init__(self, llm: ShapingLLM, living: Living) -> None:
        self._llm = llm
        self._living = living

    @property
    def busy(self) -> bool:
        return self._llm.admission.requests > 0

    def hurry(self) -> None:
        self._living.hurry()
        if self._llm.rollouts is not None:
            self._llm.rollouts.hurry()

    def fail(self, error: DartsError) -> None:
        self._living.fail(error)
        self._llm.fail(error)


def _descendants(pid: int | None) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


async def _watch(llm: ShapingLLM, living: Living) -> None:
    await hung(llm.pulse, lambda: llm.works, living.watchdog)
    living.life.end(
        EngineHung(
            f"the engine is hung: it has requests, and said nothing for {living.watchdog:g} s (--engine-watchdog)"
        )
    )


def _signalled(number: int, ending: Ending, life: Life) -> None:
    if life.over is not None:
        logger.warning("%s again: leaving at once", signal.Signals(number).name)
        leave_at_once(number)
    logger.warning(
        "%s: stopping; what runs may take its grace time, another signal ends it", signal.Signals(number).name
    )
    ending.stop()
