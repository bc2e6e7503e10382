"""The race for the shortest places: who has one for sure, who is past the bar, who may still get one."""

from collections.abc import Sequence

from darts_server.policy.candidate import Candidate


def split_by_validity(finished: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Valid and invalid candidates, each shortest first."""
    ordered = sorted(finished, key=lambda c: c.sort_key)
    return [c for c in ordered if c.valid], [c for c in ordered if not c.valid]


class ShortestPlaces:
    """The race for the K shortest places: who has one for sure, who is past the bar, who may still get one.

    The bar is the K-th shortest valid candidate so far. It can only fall, so whoever is past it stays past it.
    """

    def __init__(self, places: int, running: Sequence[Candidate], finished: Sequence[Candidate]) -> None:
        self.places = places
        self.running = running
        self.valid, self.invalid = split_by_validity(finished)
        self.enough = len(self.valid) >= places
        bar = self.valid[places - 1].sort_key if self.enough and places else (0, -1)
        self.past = [r for r in running if r.sort_key > bar] if self.enough else []
        self.contenders = [r for r in running if r.sort_key < bar] if self.enough else list(running)

    @property
    def bar(self) -> int | None:
        """Length of the last candidate that has a place at present; ``None`` while places are open."""
        return self.valid[self.places - 1].tokens if self.enough and self.places else None

    def surely_short(self) -> set[int]:
        """Finished candidates that nobody can push out of the first K places any more."""
        return {
            c.index
            for place, c in enumerate(self.valid[: self.places])
            if place + sum(r.sort_key < c.sort_key for r in self.contenders) < self.places
        }

    def surely_rest(self) -> list[Candidate]:
        """Candidates, running or finished, that cannot get one of the K first places any more."""
        return [*self.past, *self.valid[self.places :], *self.invalid] if self.enough else []

    def fewest_beaten_by(self, draw: float) -> int:
        """How many candidates with a lower lot than ``draw`` are left for the tail at the very least.

        If s contenders get places, the last s of the first K finished ones lose theirs, and the s must come in before
        all of these. The best case for ``draw`` is that the s are ones with lower lots.
        """
        sure = sum(c.tail_draw < draw for c in self.surely_rest())
        behind = sum(c.tail_draw < draw for c in self.contenders)
        fewest = behind
        for s in range(1, min(self.places, len(self.contenders)) + 1):
            losing = self.valid[self.places - s : self.places]
            able = [c for c in self.contenders if c.sort_key < losing[0].sort_key]
            if len(able) >= s:
                placed = min(s, sum(c.tail_draw < draw for c in able))
                fewest = min(fewest, behind - placed + sum(c.tail_draw < draw for c in losing))
        return sure + fewest

    def check_at(self, early: bool) -> dict[int, int]:
        """For each contender the token count at which it falls behind the next finished candidate that matters.

        That is the bar alone, or with ``early`` every finished candidate in the first K places.
        """
        marks = self.valid[0 if early else self.places - 1 : self.places]
        check_at = {}
        for r in self.contenders:
            ahead = [
                tokens if r.index < index else tokens - 1
                for tokens, index in (c.sort_key for c in marks)
                if r.sort_key < (tokens, index)
            ]
            if ahead:
                check_at[r.index] = min(ahead)
        return check_at
