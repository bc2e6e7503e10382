"""Watch the engine: whether it still sends anything, and what ended its process."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

MAX_POLL_SECONDS = 5.0
MIN_POLLS = 10
"""Within the time limit."""


class Pulse:
    """``beats``: whether the engine has sent anything since this was last reset. ``on_death``: called once."""

    def __init__(self) -> None:
        self.beats = False
        self.on_death: Callable[[], None] = lambda: None


def observe_outputs(engine_core: Any, pulse: Pulse) -> None:
    """Record the engine's pulse, and let other tasks run between two of its outputs.

    Reading from a queue that is not empty does not yield to the event loop. An API process slower than its engine would
    therefore work through the whole queue in one turn, while the queue grows: each turn would be longer than the one
    before, and nothing would be stopped, started or answered meanwhile.
    """
    get_output = engine_core.get_output_async

    async def get_output_after_yielding() -> Any:
        await asyncio.sleep(0)
        try:
            outputs = await get_output()
        except EngineDeadError:
            pulse.on_death()
            raise
        pulse.beats = True
        return outputs

    engine_core.get_output_async = get_output_after_yielding


async def wait_until_hung(pulse: Pulse, should_respond: Callable[[], bool], limit: float) -> None:
    """Return when the engine has sent nothing for ``limit`` seconds in which it should have.

    Polls are counted rather than read from a clock: time in which this process did not run, because it was stopped or
    starved, does not count.
    """
    interval, silent = min(MAX_POLL_SECONDS, limit / MIN_POLLS), 0.0
    while silent < limit:
        pulse.beats = False
        await asyncio.sleep(interval)
        silent = silent + interval if should_respond() and not pulse.beats else 0.0


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
