"""Selection rules that give some places to others than the shortest: two kinds of tail, each also with a deadline.

The deadline D of a group is its token limit, but never less than the length of its own M-th shortest valid candidate:
a prompt that needs long answers has the time for them. While the group has no limit there is no deadline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.race import Race, split
from darts_server.policy.selection import Shortest, Verdict
from darts_server.types import DiscardReason, SelectedAs


@dataclass(frozen=True, slots=True)
class _Seats:
    """K places for the shortest, L for the tail."""

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest

    def surplus(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class LongestTail(_Seats):
    """K shortest and L longest of the valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may still turn out the longest, so with L >= 1 all of them run to their end. If valid ones are
    fewer than K + L, all of them are taken and invalid ones fill up, shortest first.
    """

    def select(self, finished: Sequence[Candidate], limit: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split(finished)
        short = valid[: self.num_shortest]
        long = valid[self.num_shortest :][-self.num_longest :] if self.num_longest else []
        return {
            **{c.index: SelectedAs.SHORT for c in short},
            **{c.index: SelectedAs.LONG for c in long},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, limit: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, early)
        race = Race(self.num_shortest, running, finished)
        settled = (c.index for place, c in enumerate(race.valid) if self._is_in(place, c, race))
        return Verdict(settled=frozenset(settled), alarms=race.alarms(early) if early else {})

    def _is_in(self, place: int, candidate: Candidate, race: Race) -> bool:
        """Whether no future leaves it out, i.e. with K before it and L after it.

        ``place`` finished ones are before it. Each running one can end up after it, some also before.
        """
        before = max(0, self.num_shortest - place)
        after = max(0, self.num_longest - (len(race.valid) - place - 1))
        can_precede = sum(r.order < candidate.order for r in race.running)
        return before > can_precede or before + after > len(race.running)


@dataclass(frozen=True, slots=True)
class SampledTail(_Seats):
    """K shortest valid candidates, and L drawn by lot from all the rest.

    The rest is everything that is not among the K shortest, running or finished. A drawn candidate stays in the group
    however it ends: one that hits the length limit is returned, marked as a fill, because dropping it would hide from
    the trainer that running on earns nothing. The lots are drawn before anything has run, so the group is a function of
    lengths and seed alone, not of timing. Only if fewer than K are valid do invalid ones fill up, shortest first.
    """

    def select(self, finished: Sequence[Candidate], limit: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split(finished)
        if len(valid) < self.num_shortest:
            return Shortest(self.size).select(finished)
        rest = sorted((*valid[self.num_shortest :], *invalid), key=lambda c: c.draw)
        return {
            **{c.index: SelectedAs.SHORT for c in valid[: self.num_shortest]},
            **{c.index: SelectedAs.LONG if c.valid or c.cut else SelectedAs.FILL for c in rest[: self.num_longest]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, limit: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        race = Race(self.num_shortest, running, finished)
        short = race.surely_short()
        winners = self._winners(race, short)
        losers = [r for r in race.past if race.fewest_beaten_by(r.draw) >= self.num_longest]
        return Verdict(
            settled=frozenset(short | winners.intersection(c.index for c in finished)),
            hopeless={r.index: DiscardReason.TAIL_PRUNED for r in losers},
            # Whoever falls behind any of the K shortest can decide the lottery, not only whoever falls behind the bar.
            alarms=race.alarms(early=True),
        )

    def _winners(self, race: Race, short: set[int]) -> set[int]:
        """Candidates, running or finished, that are in the group whatever happens, and not surely ``short``."""
        rest = [c for c in (*race.running, *race.valid, *race.invalid) if c.index not in short]
        return {
            c.index
            for c in rest
            if sum(other.draw < c.draw for other in rest) < self.num_longest and (race.enough or c.valid)
        }

    def drawn(self, running: Sequence[Candidate], finished: Sequence[Candidate]) -> list[Candidate]:
        """Candidates, running or finished, that are in the group for their lot and can no longer be for being short."""
        race = Race(self.num_shortest, running, finished)
        winners = self._winners(race, race.surely_short())
        return [c for c in race.surely_rest() if c.index in winners]


@dataclass(frozen=True, slots=True)
class DeadlineTail(_Seats):
    """K shortest, and the L longest of those that are no longer than the deadline. An extension of ours.

    Whoever reaches the deadline is stopped.
    """

    def select(self, finished: Sequence[Candidate], limit: int | None = None) -> dict[int, SelectedAs]:
        needed = Race(self.size, [], finished)
        if limit is not None and needed.bar is not None:
            deadline = max(limit, needed.bar)
            finished = [c for c in finished if c.tokens <= deadline]
        return LongestTail(self.num_shortest, self.num_longest).select(finished)

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, limit: int | None = None
    ) -> Verdict:
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, early)
        race, needed = Race(self.num_shortest, running, finished), Race(self.size, running, finished)
        deadline = None if limit is None or needed.bar is None else max(limit, needed.bar)
        # The M-th shortest can only turn out shorter, and the deadline with it: who is past it stays past it.
        late = [r for r in running if deadline is not None and r.tokens >= deadline]
        hopeless = {r.index: DiscardReason.TAIL_PRUNED for r in late}
        if len(late) == len(running):
            return Verdict(frozenset(self.select(finished, limit)), hopeless)
        alarms = race.alarms(early=True) if early else {}
        if deadline is not None:
            alarms = {r.index: min(deadline, alarms.get(r.index, deadline)) for r in running}
        return Verdict(frozenset(race.surely_short()), hopeless, alarms=_without(hopeless, alarms))


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

    def select(self, finished: Sequence[Candidate], limit: int | None = None) -> dict[int, SelectedAs]:
        return self._whole.select(finished)

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, limit: int | None = None
    ) -> Verdict:
        whole = self._whole.assess(running, finished, early)
        needed = Race(self.size, running, finished)
        settled = whole.settled
        cuts: dict[int, int] = {}
        ends: dict[int, int] = {}
        if limit is not None and needed.contenders:
            # The M-th shortest, and the deadline with it, can still come down.
            short = Race(self.num_shortest, running, finished).surely_short()
            settled -= {c.index for c in finished if c.tokens > limit and c.index not in short}
        elif limit is not None and needed.bar is not None:
            deadline = max(limit, needed.bar)
            drawn = self._whole.drawn(running, finished)
            ends = {c.index: deadline for c in drawn if c.running and c.tokens < deadline}
            cuts = {c.index: deadline for c in drawn if c.index not in ends and (c.running or c.tokens > deadline)}
        if len(settled) == self.size:
            return Verdict(settled, whole.hopeless, cuts)
        past = {r.index for r in needed.past}
        hopeless = {i: reason for i, reason in whole.hopeless.items() if i in past}
        # Of two alarms of one candidate that of the K shortest is the earlier.
        alarms = {**needed.alarms(early=False), **whole.alarms, **ends}
        return Verdict(settled, hopeless, cuts, _without(hopeless, alarms))


def _without(gone: Mapping[int, DiscardReason], alarms: Mapping[int, int]) -> dict[int, int]:
    return {i: mark for i, mark in alarms.items() if i not in gone}
