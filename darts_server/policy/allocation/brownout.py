"""Redundancy falls while more waits than the engine can soon begin: what is not owed is given up before a request is.

An extension of ours. Extra candidates shorten a group only where there is room for them to run.
"""

from math import floor

RELIEF = 0.5
"""Of what was waiting when redundancy began to fall: where all of it is back. The way up runs that much below the way
down, so that it does not flicker with every group that comes and goes."""


class Brownout:
    """How much of the redundancy is left, 1 for all of it and 0 for none, as a function of what waits.

    It falls in a straight line from ``start`` waiting candidates to ``end``, where it is 0. ``end`` at or below
    ``start`` switches it off.
    """

    def __init__(self, start: float, end: float) -> None:
        self._start = start
        self._end = end
        self.scale = 1.0

    @classmethod
    def before(cls, most_waiting: int, capacity: int, share: float) -> "Brownout":
        """It begins at that share of ``most_waiting``, but not while no more wait than the engine runs at once."""
        return cls(max(share * most_waiting, capacity), most_waiting)

    def update(self, waiting: int) -> float:
        """The scale, now that so many wait."""
        if self._end > self._start:
            least, most = self._line(waiting + RELIEF * self._start), self._line(waiting)
            self.scale = min(max(self.scale, least), most)
        return self.scale

    def _line(self, waiting: float) -> float:
        return min(max((self._end - waiting) / (self._end - self._start), 0.0), 1.0)


def reduce_candidates(candidates: int, size: int, scale: float) -> int:
    """What is left of a group's candidates, never fewer than its ``size``; rounded half up."""
    return size + floor((candidates - size) * scale + 0.5)
