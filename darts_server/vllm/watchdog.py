"""Whether the engine is alive: what it says, when it says nothing for too long, and what it died of."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

LONGEST_LOOK_SECONDS = 5.0
LOOKS = 10
"""At least so many, until the time is over."""


class Pulse:
    """Hears the engine. ``heard``: whether it said anything since that was last set to false. ``died``: called once."""

    def __init__(self) -> None:
        self.heard = False
        self.died: Callable[[], None] = lambda: None


def listen(engine_core: Any, pulse: Pulse) -> None:
    """Feel the engine's pulse, and have everyone else on the event loop go on between two of its outputs.

    A queue that is not empty does not make its reader wait. So an API process slower than its engine works through all
    that has piled up in one turn, while more piles up: each turn is longer than the one before, and nothing is stopped,
    started or answered meanwhile.
    """
    get_output = engine_core.get_output_async

    async def get_output_after_the_others() -> Any:
        await asyncio.sleep(0)
        try:
            outputs = await get_output()
        except EngineDeadError:
            pulse.died()
            raise
        pulse.heard = True
        return outputs

    engine_core.get_output_async = get_output_after_the_others


async def hung(pulse: Pulse, works: Callable[[], bool], limit: float) -> None:
    """Return when the engine has said nothing for ``limit`` seconds in which it should have worked.

    The seconds are counted rather than read from a clock: those in which this process did not run, because it was
    stopped or starved, do not count.
    """
    look, silent = min(LONGEST_LOOK_SECONDS, limit / LOOKS), 0.0
    while silent < limit:
        pulse.heard = False
        await asyncio.sleep(look)
        silent = silent + look if works() and not pulse.heard else 0.0


def cause_of_death(engine_core: Any) -> str:
    """What ended the engine's process, as far as it can be seen from here."""
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
