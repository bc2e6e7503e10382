"""Remember which replica something is on: bounded, and for a while."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from darts_server.rollout.turns import Hashes, hash_of

KEPT = 65_536
IDLE_SECONDS = 600.0
"""The longest time that a group waits for its next request, with the largest --group-wait."""
MIN_PREFIX = 16
"""Tokens, or bytes of a text: a prompt that is shorter is no sign that one that begins with it goes on from it."""


@dataclass(slots=True)
class _Place:
    """``replica``: its name. ``mark``: what else is remembered with it, such as the length of a prompt."""

    replica: str
    used_at: float
    mark: int = 0


class Affinity:
    """The newest ``kept`` keys, each with the replica that it is on.

    ``idle``: seconds without use after which a key is dropped; ``None``: never. ``clock``: monotonic seconds.
    """

    def __init__(
        self, kept: int = KEPT, idle: float | None = IDLE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept = kept
        self._idle = idle
        self._clock = clock
        self._places: OrderedDict[Hashable, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: Hashable) -> str | None:
        """Return the name of the replica that a key is on, if it is known."""
        self._drop_idle()
        place = self._places.get(key)
        return None if place is None else place.replica

    def mark_of(self, key: Hashable) -> int | None:
        """Return what was remembered with a key, if it is known."""
        self._drop_idle()
        place = self._places.get(key)
        return None if place is None else place.mark

    def put(self, key: Hashable, replica: str, mark: int = 0) -> None:
        """Remember where a key is."""
        self._drop_idle()
        if (earlier := self._places.pop(key, None)) is not None:
            self._dropped(earlier)
        self._places[key] = _Place(replica, self._clock(), mark)
        if len(self._places) > self._kept:
            self._dropped(self._places.popitem(last=False)[1])

    def _drop_idle(self) -> None:
        if self._idle is None:
            return
        limit = self._clock() - self._idle
        while self._places and next(iter(self._places.values())).used_at < limit:
            self._dropped(self._places.popitem(last=False)[1])

    def _dropped(self, place: _Place) -> None:
        """Called for each key that is dropped or put again."""


class PromptAffinity(Affinity):
    """Prompts, and which of them another one begins with.

    A prompt is given by the hashes of its prefixes; see `TokenIndex`.
    """

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(kept, IDLE_SECONDS, clock)
        self._lengths: Counter[int] = Counter()

    def find_prompt(self, scope: str, prefixes: Hashes) -> str | None:
        """Return the replica of exactly that prompt."""
        return self.find((scope, hash_of(prefixes)))

    def find_prefix(self, scope: str, prefixes: Hashes, shortest: int = MIN_PREFIX) -> str | None:
        """Return the replica of the longest known prompt that a prompt begins with, if there is one."""
        self._drop_idle()
        lengths = sorted((each for each in self._lengths if shortest <= each < len(prefixes)), reverse=True)
        for key in prefixes[np.array(lengths) - 1].tolist() if lengths else ():
            if (place := self._places.get((scope, key))) is not None:
                return place.replica
        return None

    def put_prompt(self, scope: str, prefixes: Hashes, replica: str) -> None:
        self._lengths[len(prefixes)] += 1
        self.put((scope, hash_of(prefixes)), replica, len(prefixes))

    def _dropped(self, place: _Place) -> None:
        self._lengths[place.mark] -= 1
        if not self._lengths[place.mark]:
            del self._lengths[place.mark]
