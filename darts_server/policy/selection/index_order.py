"""What is certain about groups of the first candidates by index."""

from bisect import bisect_right, insort

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment, discard
from darts_server.types import DiscardReason


class InOrderAssessment(Assessment):
    """The first ``size`` candidates by index are in the group, however they finish."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._alive: list[int] = []
        self._running: list[int] = []
        self._finished: list[int] = []
        self._pending: list[int] = []  # finished, and not settled yet

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        insort(self._alive, candidate.index)
        if candidate.running:
            insort(self._running, candidate.index)
        else:
            insort(self._finished, candidate.index)
            insort(self._pending, candidate.index)

    def remove(self, index: int) -> None:
        super().remove(index)
        discard(self._alive, index)
        discard(self._running, index)

    def hopeless(self) -> dict[int, DiscardReason]:
        # A running candidate may still fail, and then a later one takes its place. So later ones are stopped only when
        # as many as are needed have finished before them.
        if len(self._finished) < self._size:
            return {}
        last = self._finished[self._size - 1]
        return dict.fromkeys(self._running[bisect_right(self._running, last) :], DiscardReason.LONGER_THAN_NEEDED)

    def newly_settled(self) -> list[int]:
        within = len(self._pending)
        if len(self._alive) > self._size:
            within = bisect_right(self._pending, self._alive[self._size - 1])
        settled, self._pending = self._pending[:within], self._pending[within:]
        return settled
