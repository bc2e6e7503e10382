"""Selection rules that give some places to others than the shortest: two kinds of tail, each also with a deadline.

The deadline D of a group is its token limit, but never less than the length of its own M-th shortest valid candidate:
a prompt that needs long answers has the time for them. While the cohort has no deadline the group has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.rules import Shortest, Verdict
from darts_server.policy.selection.shortest_places import ShortestPlaces, split_by_validity
from darts_server.types import DiscardReason, SelectedAs


@dataclass(frozen=True, slots=True)
class _Seats:
    """K places for the shortest, L for the tail."""

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class LongestTail(_Seats):
    """K shortest and L longest of the valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may still turn out the longest, so with L >= 1 all of them run to their end. If valid ones are
    fewer than K + L, all of them are taken and invalid ones fill up, shortest first.
    """

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        short = valid[: self.num_shortest]
        long = valid[self.num_shortest :][-self.num_longest :] if self.num_longest else []
        return {
            **{c.index: SelectedAs.SHORT for c in short},
            **{c.index: SelectedAs.LONG for c in long},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, early)
        race = ShortestPlaces(self.num_shortest, running, finished)
        settled = (c.index for place, c in enumerate(race.valid) if self._is_in(place, c, race))
        return Verdict(settled=frozenset(settled), check_at=race.check_at(early) if early else {})

    def _is_in(self, place: int, candidate: Candidate, race: ShortestPlaces) -> bool:
        """Whether no future leaves it out, i.e. with K before it and L after it.

        ``place`` finished ones are before it. Each running one can end up after it, some also before.
        """
        before = max(0, self.num_shortest - place)
        after = max(0, self.num_longest - (len(race.valid) - place - 1))
        can_precede = sum(r.sort_key < candidate.sort_key for r in race.running)
        return before > can_precede or before + after > len(race.running)


@dataclass(frozen=True, slots=True)
class SampledTail(_Seats):
    """K shortest valid candidates, and L drawn by lot from all the rest.

    The rest is everything that is not among the K shortest, running or finished. A drawn candidate stays in the group
    however it ends: one that hits the length limit is returned, marked as a fill, because dropping it would hide from
    the trainer that running on earns nothing. The lots are drawn before anything has run, so the group is a function of
    lengths and seed alone, not of timing. Only if fewer than K are valid do invalid ones fill up, shortest first.
    """

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        if len(valid) < self.num_shortest:
            return Shortest(self.size).select(finished)
        rest = sorted((*valid[self.num_shortest :], *invalid), key=lambda c: c.tail_draw)
        return {
            **{c.index: SelectedAs.SHORT for c in valid[: self.num_shortest]},
            **{c.index: SelectedAs.LONG if c.valid or c.cut else SelectedAs.FILL for c in rest[: self.num_longest]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        race = ShortestPlaces(self.num_shortest, running, finished)
        short = race.surely_short()
        winners = self._winners(race, short)
        losers = [r for r in race.past if race.fewest_beaten_by(r.tail_draw) >= self.num_longest]
        return Verdict(
            settled=frozenset(short | winners.intersection(c.index for c in finished)),
            hopeless={r.index: DiscardReason.TAIL_PRUNED for r in losers},
            # Whoever falls behind any of the K shortest can decide the lottery, not only whoever falls behind the bar.
            check_at=race.check_at(early=True),
        )

    def _winners(self, race: ShortestPlaces, short: set[int]) -> set[int]:
        """Candidates, running or finished, that are in the group whatever happens, and not surely ``short``."""
        rest = [c for c in (*race.running, *race.valid, *race.invalid) if c.index not in short]
        return {
            c.index
            for c in rest
            if sum(other.tail_draw < c.tail_draw for other in rest) < self.num_longest and (race.enough or c.valid)
        }

    def drawn(self, running: Sequence[Candidate], finished: Sequence[Candidate]) -> list[Candidate]:
        """Candidates, running or finished, that are in the group for their lot and can no longer be for being short."""
        race = ShortestPlaces(self.num_shortest, running, finished)
        winners = self._winners(race, race.surely_short())
        return [c for c in race.surely_rest() if c.index in winners]


@dataclass(frozen=True, slots=True)
class DeadlineTail(_Seats):
    """K shortest, and the L longest of those that are no longer than the deadline. An extension of ours.

    Whoever reaches the deadline is stopped.
    """

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        needed = ShortestPlaces(self.size, [], finished)
        if deadline is not None and needed.bar is not None:
            own_deadline = max(deadline, needed.bar)
            finished = [c for c in finished if c.tokens <= own_deadline]
        return LongestTail(self.num_shortest, self.num_longest).select(finished)

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, early)
        race, needed = (
            ShortestPlaces(self.num_shortest, running, finished),
            ShortestPlaces(self.size, running, finished),
        )
        own_deadline = None if deadline is None or needed.bar is None else max(deadline, needed.bar)
        # The M-th shortest can only turn out shorter, and the deadline with it: who is past it stays past it.
        late = [r for r in running if own_deadline is not None and r.tokens >= own_deadline]
        hopeless = {r.index: DiscardReason.TAIL_PRUNED for r in late}
        if len(late) == len(running):
            return Verdict(frozenset(self.select(finished, deadline)), hopeless)
        check_at = race.check_at(early=True) if early else {}
        if own_deadline is not None:
            check_at = {r.index: min(own_deadline, check_at.get(r.index, own_deadline)) for r in running}
        return Verdict(frozenset(race.surely_short()), hopeless, check_at=_without(hopeless, check_at))


@dataclass(frozen=True, slots=True)
class CutTail(_Seats):
    """K shortest and L drawn by lot from the rest, each drawn one with its first D tokens only. An extension of ours.

    It hides nothing from the trainer: that a trajectory ran on beyond the deadline is shown, as a truncated one. Losers
    of the lottery run until they fall behind the M-th shortest rather than the K-th, since that length is the least
    that the deadline may be.
    """

    @property
    def _whole(self) -> SampledTail:
        return SampledTail(self.num_shortest, self.num_longest)

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return self._whole.select(finished)

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        whole = self._whole.assess(running, finished, early)
        needed = ShortestPlaces(self.size, running, finished)
        settled = whole.settled
        cuts: dict[int, int] = {}
        ends: dict[int, int] = {}
        if deadline is not None and needed.contenders:
            # The M-th shortest, and the deadline with it, can still come down.
            short = ShortestPlaces(self.num_shortest, running, finished).surely_short()
            settled -= {c.index for c in finished if c.tokens > deadline and c.index not in short}
        elif deadline is not None and needed.bar is not None:
            own_deadline = max(deadline, needed.bar)
            drawn = self._whole.drawn(running, finished)
            ends = {c.index: own_deadline for c in drawn if c.running and c.tokens < own_deadline}
            cuts = {
                c.index: own_deadline for c in drawn if c.index not in ends and (c.running or c.tokens > own_deadline)
            }
        if len(settled) == self.size:
            return Verdict(settled, whole.hopeless, cuts)
        past = {r.index for r in needed.past}
        hopeless = {i: reason for i, reason in whole.hopeless.items() if i in past}
        # Of two check_at of one candidate that of the K shortest is the earlier.
        check_at = {**needed.check_at(early=False), **whole.check_at, **ends}
        return Verdict(settled, hopeless, cuts, _without(hopeless, check_at))


def _without(gone: Mapping[int, DiscardReason], check_at: Mapping[int, int]) -> dict[int, int]:
    return {i: mark for i, mark in check_at.items() if i not in gone}
