"""Selection rules: which candidates of a prompt make the group, and what is already certain while some still run.

A rule knows only lengths, validity (ended by itself rather than at the length limit), candidate indices and the lottery
numbers of the tail. It never reads a reward and never depends on the order in which candidates finished.

All rules share one total order, (length, candidate index): the shortest come first, ties go to the earlier index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from darts_server.policy.candidate import Candidate
from darts_server.types import End, StopReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is certain now, whatever the running candidates do (short of failing).

    ``settled``: finished candidates that belong to the group. ``hopeless``: running candidates that can no longer
    belong to it. ``tail``: candidates, running or finished, that belong to it and not for being short; these may be
    cut. ``alarms``: for a running candidate, the number of generated tokens at which this verdict may change, so that
    nobody needs to look before.
    """

    settled: frozenset[int]
    hopeless: Mapping[int, StopReason] = field(default_factory=dict)
    tail: frozenset[int] = frozenset()
    alarms: Mapping[int, int] = field(default_factory=dict)


class SelectionRule(Protocol):
    """How the group is chosen. ``size`` trajectories are returned."""

    @property
    def size(self) -> int: ...

    @property
    def num_shortest(self) -> int:
        """K: when that many have finished, what is left is the tail."""
        ...

    def select(self, finished: Sequence[Candidate]) -> dict[int, End]:
        """Choose from candidates that have all finished; fewer than ``size`` only when there are fewer."""
        ...

    def assess(self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool) -> Verdict:
        """Say what is certain. ``early``: settle the finished as soon as possible, at the cost of more alarms."""
        ...

    def surplus(self, candidate: Candidate) -> StopReason:
        """Why a finished candidate was not chosen."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """The first ``size`` candidates by index, however they ended: no shaping."""

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate]) -> dict[int, End]:
        chosen = sorted(finished, key=lambda c: c.index)[: self.size]
        return {c.index: End.SHORT if c.valid else End.FILL for c in chosen}

    def assess(self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool) -> Verdict:
        indices = sorted(c.index for c in (*running, *finished))
        done = sorted(c.index for c in finished)
        seats = set(indices[: self.size])
        last = done[self.size - 1] if len(done) >= self.size else None
        return Verdict(
            settled=frozenset(seats.intersection(done)),
            hopeless={r.index: StopReason.LONGER_THAN_NEEDED for r in running if last is not None and r.index > last},
        )

    def surplus(self, candidate: Candidate) -> StopReason:
        return StopReason.MIDDLE


@dataclass(frozen=True, slots=True)
class Shortest:
    """The ``size`` shortest valid candidates; invalid ones, shortest first, only where valid ones are too few.

    DARTS, variance-guided tail pruning: the rule for saturated prompts.
    """

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate]) -> dict[int, End]:
        valid, invalid = split(finished)
        return {
            **{c.index: End.SHORT for c in valid[: self.size]},
            **{c.index: End.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        race = Race(self.size, running, finished)
        return Verdict(
            settled=frozenset(race.surely_short()),
            hopeless={r.index: StopReason.LONGER_THAN_NEEDED for r in race.past},
            alarms=race.alarms(early),
        )

    def surplus(self, candidate: Candidate) -> StopReason:
        return StopReason.LONGER_THAN_NEEDED if candidate.valid else StopReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class LongestTail:
    """K shortest and L longest of the valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may still turn out the longest, so with L >= 1 all of them run to their end. If valid ones are
    fewer than K + L, all of them are taken and invalid ones fill up, shortest first.
    """

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest

    def select(self, finished: Sequence[Candidate]) -> dict[int, End]:
        valid, invalid = split(finished)
        short = valid[: self.num_shortest]
        long = valid[self.num_shortest :][-self.num_longest :] if self.num_longest else []
        return {
            **{c.index: End.SHORT for c in short},
            **{c.index: End.LONG for c in long},
            **{c.index: End.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, early)
        race = Race(self.num_shortest, running, finished)
        settled = (c.index for place, c in enumerate(race.valid) if self._is_in(place, c, race))
        return Verdict(settled=frozenset(settled), alarms=race.alarms(early) if early else {})

    def _is_in(self, place: int, candidate: Candidate, race: "Race") -> bool:
        """Whether no future leaves it out, i.e. with K before it and L after it.

        ``place`` finished ones are before it. Each running one can end up after it, some also before.
        """
        before = max(0, self.num_shortest - place)
        after = max(0, self.num_longest - (len(race.valid) - place - 1))
        can_precede = sum(r.order < candidate.order for r in race.running)
        return before > can_precede or before + after > len(race.running)

    def surplus(self, candidate: Candidate) -> StopReason:
        return StopReason.MIDDLE if candidate.valid else StopReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class SampledTail:
    """K shortest valid candidates, and L drawn by lot from all the rest.

    The rest is everything that is not among the K shortest, running or finished. A drawn candidate stays in the group
    however it ends: one that hits the length limit is returned, marked as a fill, because dropping it would hide from
    the trainer that running on earns nothing. The lots are drawn before anything has run, so the group is a function of
    lengths and seed alone, not of timing. Only if fewer than K are valid do invalid ones fill up, shortest first.
    """

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest

    def select(self, finished: Sequence[Candidate]) -> dict[int, End]:
        valid, invalid = split(finished)
        if len(valid) < self.num_shortest:
            return Shortest(self.size).select(finished)
        rest = sorted((*valid[self.num_shortest :], *invalid), key=lambda c: c.draw)
        return {
            **{c.index: End.SHORT for c in valid[: self.num_shortest]},
            **{c.index: End.LONG if c.valid or c.cut else End.FILL for c in rest[: self.num_longest]},
        }

    def assess(self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool) -> Verdict:
        race = Race(self.num_shortest, running, finished)
        if not running:
            chosen = frozenset(self.select(finished))
            return Verdict(settled=chosen, tail=chosen.intersection(c.index for c in race.surely_rest()))
        short = race.surely_short()
        rest = [c for c in (*running, *finished) if c.index not in short]
        winners = {
            c.index
            for c in rest
            if sum(other.draw < c.draw for other in rest) < self.num_longest and (race.enough or c.valid)
        }
        losers = [r for r in race.past if race.fewest_beaten_by(r.draw) >= self.num_longest]
        return Verdict(
            settled=frozenset(short | winners.intersection(c.index for c in finished)),
            hopeless={r.index: StopReason.TAIL_PRUNED for r in losers},
            tail=frozenset(winners.intersection(c.index for c in race.surely_rest())),
            # Whoever falls behind any of the K shortest can decide the lottery, not only whoever falls behind the bar.
            alarms=race.alarms(early=True),
        )

    def surplus(self, candidate: Candidate) -> StopReason:
        return StopReason.MIDDLE if candidate.valid else StopReason.TRUNCATED


def split(finished: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Valid and invalid candidates, each shortest first."""
    ordered = sorted(finished, key=lambda c: c.order)
    return [c for c in ordered if c.valid], [c for c in ordered if not c.valid]


class Race:
    """The race for the K shortest places: who has one for sure, who is past the bar, who may still get one.

    The bar is the K-th shortest valid candidate so far. It can only fall, so whoever is past it stays past it.
    """

    def __init__(self, places: int, running: Sequence[Candidate], finished: Sequence[Candidate]) -> None:
        self.places = places
        self.running = running
        self.valid, self.invalid = split(finished)
        self.enough = len(self.valid) >= places
        bar = self.valid[places - 1].order if self.enough and places else (0, -1)
        self.past = [r for r in running if r.order > bar] if self.enough else []
        self.contenders = [r for r in running if r.order < bar] if self.enough else list(running)

    def surely_short(self) -> set[int]:
        """Finished candidates that nobody can push out of the first K places any more."""
        return {
            c.index
            for place, c in enumerate(self.valid[: self.places])
            if place + sum(r.order < c.order for r in self.contenders) < self.places
        }

    def surely_rest(self) -> list[Candidate]:
        """Candidates, running or finished, that cannot get one of the K first places any more."""
        return [*self.past, *self.valid[self.places :], *self.invalid] if self.enough else []

    def fewest_beaten_by(self, draw: float) -> int:
        """How many candidates with a lower lot than ``draw`` are left for the tail at the very least.

        If s contenders get places, the last s of the first K finished ones lose theirs, and the s must come in before
        all of these. The best case for ``draw`` is that the s are ones with lower lots.
        """
        sure = sum(c.draw < draw for c in self.surely_rest())
        behind = sum(c.draw < draw for c in self.contenders)
        fewest = behind
        for s in range(1, min(self.places, len(self.contenders)) + 1):
            losing = self.valid[self.places - s : self.places]
            able = [c for c in self.contenders if c.order < losing[0].order]
            if len(able) >= s:
                placed = min(s, sum(c.draw < draw for c in able))
                fewest = min(fewest, behind - placed + sum(c.draw < draw for c in losing))
        return sure + fewest

    def alarms(self, early: bool) -> dict[int, int]:
        """For each contender the token count at which it falls behind the next finished candidate that matters.

        That is the bar alone, or with ``early`` every finished candidate in the first K places.
        """
        marks = self.valid[0 if early else self.places - 1 : self.places]
        alarms = {}
        for r in self.contenders:
            ahead = [
                tokens if r.index < index else tokens - 1
                for tokens, index in (c.order for c in marks)
                if r.order < (tokens, index)
            ]
            if ahead:
                alarms[r.index] = min(ahead)
        return alarms
