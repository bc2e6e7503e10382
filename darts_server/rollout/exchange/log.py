"""The newest observations of this server, for others to learn from."""

import secrets
from collections import deque

from darts_server.rollout.exchange.observations import Observation

MAX_KEPT = 16_384
"""Observations: some batches of a thousand groups, with their rewards."""
MAX_SIZE = 160_000
"""Candidates and prompts of all of them. The records of most groups are kept in any case, see `Provenance`."""


class ObservationLog:
    """Keep the newest observations, numbered from 1 on.

    ``life``: names this log; another one after each restart, and after `restart`. ``last``: the newest number.
    """

    def __init__(self, max_kept: int = MAX_KEPT, max_size: int = MAX_SIZE) -> None:
        self._max_kept = max_kept
        self._max_size = max_size
        self.restart()

    def restart(self) -> None:
        """Forget everything, and begin another life."""
        self.life = secrets.token_hex(8)
        self.last = 0
        self._size = 0
        self._kept: deque[Observation] = deque()

    def add(self, observation: Observation) -> None:
        self.last += 1
        self._kept.append(observation)
        self._size += observation.size
        while len(self._kept) > self._max_kept or (self._size > self._max_size and len(self._kept) > 1):
            self._size -= self._kept.popleft().size

    def after(self, number: int, most: int) -> list[tuple[int, Observation]]:
        """Return the oldest observations after that number, with theirs, at most so many."""
        first = self.last - len(self._kept) + 1
        start = max(0, number + 1 - first)
        return [(first + at, self._kept[at]) for at in range(start, min(start + most, len(self._kept)))]
