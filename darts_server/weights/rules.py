"""What happens to running groups during a weight update, and how long its steps may take."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

STEP_TIMEOUT = 300.0


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
