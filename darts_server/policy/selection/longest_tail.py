"""What is certain about groups whose tail is the longest candidates."""

from bisect import bisect_left

from darts_server.policy.selection.assessment import ShortestAssessment
from darts_server.policy.selection.standings import Key
from darts_server.types import DiscardReason


class LongestTailAssessment(ShortestAssessment):
    """The K shortest and the L >= 1 longest valid candidates are in the group: any running one may be the longest."""

    def __init__(self, num_shortest: int, num_longest: int, deliver_early: bool) -> None:
        super().__init__(num_shortest, deliver_early)
        self._num_longest = num_longest

    def hopeless(self) -> dict[int, DiscardReason]:
        return {}

    def newly_settled(self) -> list[int]:
        settled = []
        while self.pending and self._is_settled(self.pending[0]):
            settled.append(self.pending.pop(0)[1])
        while self.pending and self._is_settled(self.pending[-1]):
            settled.append(self.pending.pop()[1])
        return settled

    def check_at(self) -> dict[int, int]:
        return super().check_at() if self.deliver_early else {}

    def _is_settled(self, key: Key) -> bool:
        """Whether no outcome of the running candidates leaves out this valid one.

        It is left out only with at least K valid ones before it and at least L after it. Any running candidate can end
        after it; only those shorter so far can end before it. So those that are settled are the first ones, and the
        last ones.
        """
        running, valid = self.standings.running, self.standings.valid
        rank = bisect_left(valid, key)
        missing_before = max(0, self.places.places - rank)
        missing_after = max(0, self._num_longest - (len(valid) - rank - 1))
        can_precede = bisect_left(running, key)
        return missing_before > can_precede or missing_before + missing_after > len(running)
