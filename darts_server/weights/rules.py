"""An update of the weights: what it does to running groups, how long its steps may take, and how long they took."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeVar

from darts_server.exceptions import UpdateFailed

T = TypeVar("T")

STEP_TIMEOUT = 300.0
REMEDIES = {"wait": "groups still run; see --weights-wait, or use the rule keep"}
"""What to do about a phase that timed out; for all others see ``--weights-timeout``."""


class Rule(StrEnum):
    """What happens to running groups when the weights change."""

    FINISH = "finish"
    """Wait for them; new groups wait until the update has ended."""
    KEEP = "keep"
    """Pause them, and continue with the new weights. Their trajectories are marked as mixed."""
    RESTART = "restart"
    """Stop them, and restart them with the new weights. Groups that were partly returned already are waited for."""


RuleName = Literal["finish", "keep", "resume", "restart"]
"""What callers may write: ``resume`` is another name of ``keep``."""


def find_rule(name: RuleName) -> Rule:
    return Rule.KEEP if name == "resume" else Rule(name)


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The default rule and the timeouts, in seconds.

    ``wait_timeout``: for running groups to end. ``step_timeout``: for any other phase of an update, and between two
    calls of a trainer that updates the model through vLLM's routes.
    """

    rule: Rule = Rule.FINISH
    wait_timeout: float = 600.0
    step_timeout: float = STEP_TIMEOUT


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
