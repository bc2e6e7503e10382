"""What is certain about groups of the first candidates to finish."""

from bisect import insort

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment
from darts_server.types import DiscardReason


class FirstFinishAssessment(Assessment):
    """The first ``size`` valid candidates to finish are in the group."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._valid: list[tuple[int, int]] = []  # (finish position, index)
        self._settled = 0

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        if candidate.valid:
            insort(self._valid, (candidate.finish_position, candidate.index))

    def hopeless(self) -> dict[int, DiscardReason]:
        if len(self._valid) < self._size:
            return {}
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in self.standings.running}

    def newly_settled(self) -> list[int]:
        settled = [index for _, index in self._valid[self._settled : self._size]]
        self._settled += len(settled)
        return settled
