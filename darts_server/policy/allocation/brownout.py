"""Reduce redundancy under load: extra candidates are given up before a request has to be refused.

Also while a batch runs under `auto`, which has expected to have the engine to itself: groups of which nothing was
generated yet keep the share of their extra candidates that the batch has of the engine.

An extension of ours. Extra candidates shorten a group only if the engine has room for them to run.
"""

from math import floor

RELIEF = 0.5
"""Share of ``start`` by which the queue must be shorter on the way up than on the way down. Without this gap the scale
would flicker with every group that comes and goes."""


class Brownout:
    """The share of redundancy that is left, from 1 (all of it) to 0 (none), by the number of waiting candidates.

    It falls linearly from ``start`` waiting candidates to ``end``, where it is 0. If ``end`` is not above ``start``, it
    stays 1.
    """

    def __init__(self, start: float, end: float) -> None:
        self._start = start
        self._end = end
        self.scale = 1.0

    @classmethod
    def for_queue(cls, max_waiting: int, capacity: int, share: float) -> "Brownout":
        """Start at ``share`` of ``max_waiting``, but not while fewer wait than the engine runs at once."""
        return cls(max(share * max_waiting, capacity), max_waiting)

    def update(self, waiting: int) -> float:
        """Return the scale for so many waiting candidates."""
        if self._end > self._start:
            least, greatest = self._line(waiting + RELIEF * self._start), self._line(waiting)
            self.scale = min(max(self.scale, least), greatest)
        return self.scale

    def _line(self, waiting: float) -> float:
        return min(max((self._end - waiting) / (self._end - self._start), 0.0), 1.0)


def share_left(capacity: int | None, unfinished: int, own: int) -> float:
    """Return the share of an engine that others leave to a batch, from 1 (all of it, or nothing queues) to 0.

    ``capacity``: sequences that run at once; ``None`` for any number. ``unfinished``: those that run or queue, with the
    batch's ``own``.
    """
    if capacity is None or unfinished <= capacity:
        return 1.0
    return min(max((capacity - (unfinished - own)) / capacity, 0.0), 1.0)


def reduce_candidates(candidates: int, size: int, scale: float) -> int:
    """Return a group's candidates at this ``scale``, never fewer than its ``size``; rounded half up."""
    return size + floor((candidates - size) * scale + 0.5)
