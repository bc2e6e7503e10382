"""Selection rules: which candidates of a prompt make the group, and what is already certain while some still run.

A rule knows only lengths, validity (ended by itself rather than at the length limit), candidate indices, the lottery
numbers of the tail and the group's token limit. It never reads a reward, and but for the baseline `FirstFinish` never
depends on the order in which candidates finished.

All rules share one total order, (length, candidate index): the shortest come first, ties go to the earlier index. Rules
with a tail are in `tails`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.shortest_places import ShortestPlaces, split_by_validity
from darts_server.types import DiscardReason, SelectedAs


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is certain now, whatever the running candidates do (short of failing).

    ``settled``: finished candidates that belong to the group. ``hopeless``: running candidates that can no longer
    belong to it. ``cuts``: candidates, running or finished, that belong to it with their first tokens only, and how
    many these are. ``check_at``: for a running candidate, the number of generated tokens at which this verdict may
    change, so that nobody needs to look before. ``observing``: the group goes on when all its seats are settled.
    """

    settled: frozenset[int]
    hopeless: Mapping[int, DiscardReason] = field(default_factory=dict)
    cuts: Mapping[int, int] = field(default_factory=dict)
    check_at: Mapping[int, int] = field(default_factory=dict)
    observing: bool = False


class SelectionRule(Protocol):
    """How the group is chosen. ``size`` trajectories are returned.

    ``limit``: the group's token limit, ``None`` while there is none; only rules with a deadline heed it.
    """

    @property
    def size(self) -> int: ...

    @property
    def num_shortest(self) -> int:
        """K: when that many have finished, what is left is the tail."""
        ...

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        """Choose from candidates that have all finished; fewer than ``size`` only when there are fewer."""
        ...

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        """Say what is certain. ``early``: settle the finished as soon as possible, at the cost of more check_at."""
        ...

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        """Why a finished candidate was not chosen."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """The first ``size`` candidates by index, however they ended: no shaping."""

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        chosen = sorted(finished, key=lambda c: c.index)[: self.size]
        return {c.index: SelectedAs.SHORT if c.valid else SelectedAs.FILL for c in chosen}

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        indices = sorted(c.index for c in (*running, *finished))
        done = sorted(c.index for c in finished)
        seats = set(indices[: self.size])
        last = done[self.size - 1] if len(done) >= self.size else None
        return Verdict(
            settled=frozenset(seats.intersection(done)),
            hopeless={
                r.index: DiscardReason.LONGER_THAN_NEEDED for r in running if last is not None and r.index > last
            },
        )

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE


@dataclass(frozen=True, slots=True)
class Shortest:
    """The ``size`` shortest valid candidates; invalid ones, shortest first, only where valid ones are too few.

    DARTS, variance-guided tail pruning: the rule for saturated prompts.
    """

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        return {
            **{c.index: SelectedAs.SHORT for c in valid[: self.size]},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        race = ShortestPlaces(self.size, running, finished)
        return Verdict(
            settled=frozenset(race.surely_short()),
            hopeless={r.index: DiscardReason.LONGER_THAN_NEEDED for r in race.past},
            check_at=race.check_at(early),
        )

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.LONGER_THAN_NEEDED if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class FirstFinish:
    """The first ``size`` valid candidates to finish; invalid ones, in the same order, only where these are too few.

    A baseline: what the paper's public code does for saturated prompts, taking finish order for length order. Where
    candidates start at different times, a short one that began late is lost to a long one that began early.
    """

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        order = sorted(finished, key=lambda c: (not c.valid, c.finish_position))
        return {c.index: SelectedAs.SHORT if c.valid else SelectedAs.FILL for c in order[: self.size]}

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        valid, _ = split_by_validity(finished)
        enough = len(valid) >= self.size
        return Verdict(
            settled=frozenset(self.select(finished) if enough or not running else (c.index for c in valid)),
            hopeless={r.index: DiscardReason.LONGER_THAN_NEEDED for r in running if enough},
        )

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.LONGER_THAN_NEEDED if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class Shadow:
    """The unshaped group of the first candidates by index, while all candidates run to their end to be watched.

    ``shadowed`` is the rule whose choice among them is recorded, and not returned.
    """

    shadowed: SelectionRule

    @property
    def size(self) -> int:
        return self.shadowed.size

    @property
    def num_shortest(self) -> int:
        return self.size

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return InOrder(self.size).select(finished)

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        return Verdict(InOrder(self.size).assess(running, finished, early).settled, observing=bool(running))

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.WATCHED
