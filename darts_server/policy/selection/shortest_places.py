"""Which candidates are certain to be among the K shortest, and which are certain not to be, while some still run."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.standings import Key, Standings

BEFORE_ALL: Key = (0, -1)
"""A key that comes before those of all candidates."""


def split_by_validity(finished: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the valid and the invalid candidates, each shortest first."""
    ordered = sorted(finished, key=lambda c: c.sort_key)
    return [c for c in ordered if c.valid], [c for c in ordered if not c.valid]


class ShortestPlaces:
    """The places of the K shortest valid candidates: who has one for certain, who cannot get one, who still can.

    The threshold is the K-th shortest valid candidate so far. It can only come down, and a running candidate only gets
    longer: whoever has passed it has passed it for good. So candidates can be stopped before all have finished.

    Every method takes O(log n), and those that return candidates as much again for each of them.
    """

    def __init__(self, places: int, standings: Standings) -> None:
        self.places = places
        self._standings = standings

    @property
    def is_full(self) -> bool:
        """Whether K valid candidates have finished."""
        return len(self._standings.valid) >= self.places

    @property
    def last(self) -> Key | None:
        """Key of the K-th shortest valid candidate so far; ``None`` while fewer have finished."""
        if not self.is_full:
            return None
        return self._standings.valid[self.places - 1] if self.places else BEFORE_ALL

    @property
    def threshold(self) -> int | None:
        """Length of the K-th shortest valid candidate so far; ``None`` while fewer have finished."""
        return None if self.last is None or not self.places else self.last[0]

    @property
    def num_contenders(self) -> int:
        """Number of running candidates that can still get a place: they come first among the running ones."""
        running = self._standings.running
        return len(running) if self.last is None else bisect_left(running, self.last)

    @property
    def contenders(self) -> Sequence[Key]:
        return self._standings.running[: self.num_contenders]

    @property
    def passed(self) -> Sequence[Key]:
        """Running candidates beyond the threshold."""
        return self._standings.running[self.num_contenders :]

    def is_certain(self, place: int) -> bool:
        """Whether the valid candidate at this ``place`` (from 0) keeps one, whatever the running ones do.

        If it does, so do all shorter ones.
        """
        return place + bisect_left(self._standings.running, self._standings.valid[place]) < self.places

    def check_at(self, contender: Key, at_every_place: bool) -> int | None:
        """Return the token count at which a contender falls behind the next finished candidate; ``None`` without one.

        Only the threshold counts or, ``at_every_place``, each finished candidate that has one of the K places. Of two
        equal lengths the earlier index is first, so a contender with a later index falls behind one token earlier.
        """
        valid = self._standings.valid
        place = bisect_left(valid, contender) if at_every_place else self.places - 1
        if place >= min(self.places, len(valid)):
            return None
        tokens, index = valid[place]
        return tokens if contender[1] < index else tokens - 1

    def checks(self, at_every_place: bool) -> dict[int, int]:
        """Return `check_at` of each contender that has one, by index."""
        counts = ((contender[1], self.check_at(contender, at_every_place)) for contender in self.contenders)
        return {index: tokens for index, tokens in counts if tokens is not None}


def own_deadline(deadline: int | None, bound: int | None, places: ShortestPlaces) -> int | None:
    """Return the group's deadline: the cohort's, but at least the length of its own last place, and at most the bound.

    It can only come down. While there are fewer valid candidates than places it is the bound; ``None`` without one.
    """
    if deadline is None:
        return None
    if places.threshold is None:
        return bound
    own = max(deadline, places.threshold)
    return own if bound is None else min(own, bound)


def with_bound(checks: dict[int, int], bound: int | None, running: Sequence[Key]) -> dict[int, int]:
    """Add to ``checks`` that each running candidate is cut at the bound."""
    return checks if bound is None else {index: min(bound, checks.get(index, bound)) for _, index in running}
