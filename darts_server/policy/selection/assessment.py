"""What is certain about a group while its candidates run: the part of a selection rule that follows the group."""

from bisect import bisect_left, insort
from typing import ClassVar, TypeVar

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.shortest_places import ShortestPlaces
from darts_server.policy.selection.standings import Key, Standings
from darts_server.types import DiscardReason

ItemT = TypeVar("ItemT", Key, tuple[float, int], int)


class Assessment:
    """What is certain, whatever the running candidates do, as long as they do not fail.

    It is updated with each candidate that changes, so that an event costs O(log n) rather than a look at the whole
    group. All methods but `update` are queries: they change nothing, except that `newly_settled` remembers its answers.

    A group is complete when nothing runs that is not hopeless. This base class holds nothing for certain, so its group
    waits for all candidates.
    """

    has_deadline: ClassVar[bool] = False
    """Whether the group has a deadline, and a bound. Otherwise both are ignored."""

    def __init__(self) -> None:
        self.standings = Standings()
        self.deadline: int | None = None
        """The cohort's deadline in tokens; ``None`` while there is none."""
        self.bound: int | None = None
        """Length at which every candidate is cut; ``None`` while there is none."""

    def update(self, candidate: Candidate) -> None:
        """Take over the present state of a candidate: new, longer, finished, cut or discarded."""
        self.remove(candidate.index)
        if candidate.alive:
            self.add(candidate)

    def add(self, candidate: Candidate) -> None:
        self.standings.add(candidate)

    def remove(self, index: int) -> None:
        """Remove a candidate that was discarded, or that is added again. Harmless if it is not here."""
        self.standings.remove(index)

    def hopeless(self) -> dict[int, DiscardReason]:
        """Running candidates that cannot be in the group any more, and why."""
        return {}

    def cuts(self) -> dict[int, int]:
        """Candidates, running or finished, of which only the first tokens are in the group, and how many."""
        return {}

    def newly_settled(self) -> list[int]:
        """Finished candidates that are certain to be in the group, and were not returned by an earlier call."""
        return []

    def at_bound(self) -> list[int]:
        """Running candidates that have reached the bound."""
        if self.bound is None or not self.has_deadline:
            return []
        running = self.standings.running  # by keys, which are one token more than each has
        return [index for _, index in running[bisect_left(running, (self.bound + 1, -1)) :]]

    def check_at(self) -> dict[int, int]:
        """Running candidate -> token count at which anything above may change; progress before that changes nothing.

        Candidates that are hopeless must have been removed.
        """
        return {}


class ShortestAssessment(Assessment):
    """The K shortest valid candidates are in the group; whoever has passed the K-th of them is not.

    ``deliver_early``: whether `newly_settled` is called, which takes more checks.
    """

    def __init__(self, places: int, deliver_early: bool) -> None:
        super().__init__()
        self.places = ShortestPlaces(places, self.standings)
        self.deliver_early = deliver_early
        self.pending: list[Key] = []
        """Valid candidates that are not settled yet, shortest first."""

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        if candidate.valid:  # which it stays: only a rule that cuts changes that
            insort(self.pending, candidate.sort_key)

    def hopeless(self) -> dict[int, DiscardReason]:
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in self.places.passed}

    def newly_settled(self) -> list[int]:
        settled = []
        while self.pending and self.places.is_certain(bisect_left(self.standings.valid, self.pending[0])):
            settled.append(self.pending.pop(0)[1])
        return settled

    def check_at(self) -> dict[int, int]:
        return self.places.checks(at_every_place=self.deliver_early)


def discard(items: list[ItemT], item: ItemT) -> None:
    """Remove ``item`` from a sorted list, if it is there."""
    place = bisect_left(items, item)
    if items[place : place + 1] == [item]:
        del items[place]
