"""One weight update in progress, and the time that its phases take."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from darts_server.exceptions import UpdateFailed
from darts_server.weights.rules import STEP_TIMEOUT, Rule

T = TypeVar("T")

REMEDIES = {"wait": "groups still run; see --weights-wait, or use the rule keep"}
"""What to do about a phase that timed out; for all others see ``--weights-timeout``."""


@dataclass(slots=True)
class Update:
    """A weight update in progress.

    ``source``: how the weights arrive. ``rule``: ``None`` if the trainer paused the engine itself. ``lora``: name of
    the LoRA adapter that is updated; ``None`` for the model itself. ``timeout``: seconds that each phase may take.
    ``when_staged``: awaited when the new weights have been checked; if it fails, the update is refused. ``seconds``:
    duration of each phase so far.
    """

    source: str
    rule: Rule | None
    partial: bool = False
    lora: str | None = None
    timeout: float = STEP_TIMEOUT
    when_staged: Callable[[], Awaitable[None]] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    async def run_phase(self, phase: str, step: Callable[[], Awaitable[T]], timeout: float | None = None) -> T:
        """Await ``step`` within the timeout, and add its duration to the phase.

        Raises:
            UpdateFailed: it timed out.
        """
        timeout = self.timeout if timeout is None else timeout
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                return await step()
        except TimeoutError as error:
            remedy = REMEDIES.get(phase, "see --weights-timeout")
            raise UpdateFailed(f"{phase} took longer than {timeout:g} s; {remedy}") from error
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began
