"""Which candidates are certain to be among the K shortest, and which are certain not to be, while some still run."""

from collections.abc import Sequence

from darts_server.policy.candidate import Candidate


def split_by_validity(finished: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the valid and the invalid candidates, each shortest first."""
    ordered = sorted(finished, key=lambda c: c.sort_key)
    return [c for c in ordered if c.valid], [c for c in ordered if not c.valid]


class ShortestPlaces:
    """The places of the K shortest valid candidates: who has one for certain, who cannot get one, who still can.

    The threshold is the K-th shortest valid candidate so far. It can only come down, and a running candidate only gets
    longer: whoever has passed it has passed it for good. So candidates can be stopped before all have finished.

    ``passed``: running candidates beyond the threshold. ``contenders``: running candidates that can still get a place.
    ``valid``, ``invalid``: finished ones, shortest first. ``is_full``: whether K valid candidates have finished.
    """

    def __init__(self, places: int, running: Sequence[Candidate], finished: Sequence[Candidate]) -> None:
        self.places = places
        self.running = running
        self.valid, self.invalid = split_by_validity(finished)
        self.is_full = len(self.valid) >= places
        last = self.valid[places - 1].sort_key if self.is_full and places else (0, -1)
        self.passed = [r for r in running if r.sort_key > last] if self.is_full else []
        self.contenders = [r for r in running if r.sort_key < last] if self.is_full else list(running)

    @property
    def threshold(self) -> int | None:
        """Length of the K-th shortest valid candidate so far; ``None`` while fewer have finished."""
        return self.valid[self.places - 1].tokens if self.is_full and self.places else None

    def certain(self) -> set[int]:
        """Return the finished candidates that keep their place whatever the running ones do."""
        return {
            c.index
            for place, c in enumerate(self.valid[: self.places])
            if place + sum(r.sort_key < c.sort_key for r in self.contenders) < self.places
        }

    def excluded(self) -> list[Candidate]:
        """Return the candidates, running or finished, that cannot get a place any more."""
        return [*self.passed, *self.valid[self.places :], *self.invalid] if self.is_full else []

    def fewest_ahead(self, tail_draw: float) -> int:
        """Return how many candidates outside the K places will have a lower tail draw, in the best case for this one.

        A contender that gets a place leaves the competition for the tail, but pushes out the last candidate that has
        one, which then enters it. If s contenders get places, they must finish before the last s finished ones of the
        first K, and it is those s that lose their places. The best case is that the s contenders are ones with lower
        draws; all s are tried.
        """
        sure = sum(c.tail_draw < tail_draw for c in self.excluded())
        behind = sum(c.tail_draw < tail_draw for c in self.contenders)
        fewest = behind
        for s in range(1, min(self.places, len(self.contenders)) + 1):
            pushed_out = self.valid[self.places - s : self.places]
            able = [c for c in self.contenders if c.sort_key < pushed_out[0].sort_key]
            if len(able) >= s:
                placed = min(s, sum(c.tail_draw < tail_draw for c in able))
                fewest = min(fewest, behind - placed + sum(c.tail_draw < tail_draw for c in pushed_out))
        return sure + fewest

    def check_at(self, at_every_place: bool) -> dict[int, int]:
        """Return for each contender the token count at which it falls behind the next finished candidate.

        Only the threshold counts or, ``at_every_place``, each finished candidate that has one of the K places. Of two
        equal lengths the earlier index is first, so a contender with a later index falls behind one token earlier.
        """
        ahead_of = self.valid[0 if at_every_place else self.places - 1 : self.places]
        counts = {}
        for r in self.contenders:
            ahead = [
                tokens if r.index < index else tokens - 1
                for tokens, index in (c.sort_key for c in ahead_of)
                if r.sort_key < (tokens, index)
            ]
            if ahead:
                counts[r.index] = min(ahead)
        return counts
