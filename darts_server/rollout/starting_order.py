"""In which order candidates start that wait for an engine with priorities: those first that are expected to be longest.

A rollout ends with its last candidate, so a long one that starts late holds all of it up. The order changes nothing of
what is returned. It bounds how long anything waits: a request goes before shorter ones that have come as long before it
as it is expected to take longer, and not before others, however long it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from darts_server.rollout.learned.statistics import Statistics

TOKEN_SECONDS = 0.03
"""How long a request waits for one that is expected to have one more token: about a decode step of a full engine."""


@dataclass(frozen=True, slots=True)
class StartingOrder:
    """The order of a group's candidates among others. ``since``: when it came, in seconds. ``expected``: tokens."""

    since: float = 0.0
    expected: float = 0.0

    def of(self, tokens: int = 0) -> float:
        """Return the place of a candidate that has generated so many tokens already: the lowest start first.

        One that has become longer than was expected is a straggler, and will not be shorter.
        """
        return self.since - TOKEN_SECONDS * max(self.expected, tokens)


NO_ORDER = StartingOrder()


def starting_order(statistics: Statistics, clock: Callable[[], float], prompt_key: str | None) -> StartingOrder:
    """Return the order of a request that comes now. A new prompt is expected to be as long as the data set's mean."""
    mean = None if prompt_key is None else statistics.prompts.mean(prompt_key)
    return StartingOrder(clock(), mean or statistics.dataset.stats.mean or 0.0)
