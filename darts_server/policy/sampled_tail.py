"""Selection rules whose tail is sampled, by random numbers that are drawn before anything runs; also with a deadline.

The deadline D of a group is that of its cohort, but at least the length of its own M-th shortest valid candidate: a
prompt that needs long answers has the time for them. While the cohort has no deadline the group has none. A bound may
be set with the deadline: then every candidate is cut there, as if it were the length limit.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection import (
    Assessment,
    SelectionRule,
    ShortestPlaces,
    Standings,
    remove_sorted,
    split_by_validity,
)
from darts_server.types import DiscardReason, SelectedAs

Draw = tuple[float, int]
"""(tail draw, index)"""


class SampledTail(SelectionRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    The random numbers are drawn before anything runs: once the K shortest are certain, so is who wins among the rest,
    and the others can be stopped. Drawn later, they would favour candidates that finish early. It also makes the group
    a function of lengths and seed alone.

    A sampled candidate stays in the group however it ends. Replacing one that hits the length limit would hide from the
    trainer that running on earns nothing. If fewer than K are valid, their places are sampled from the rest too. So
    each of the rest has the same probability to be returned, in every case.
    """

    __slots__ = ()

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        short = valid[: self.num_shortest]
        truncated = SelectedAs.FILL if len(short) < self.num_shortest else SelectedAs.LONG_TRUNCATED
        rest = sorted((*valid[self.num_shortest :], *invalid), key=lambda c: c.tail_draw)
        return {
            **{c.index: SelectedAs.SHORT for c in short},
            **{c.index: SelectedAs.LONG if c.valid or c.cut else truncated for c in rest[: self.size - len(short)]},
        }

    @property
    def samples_rest(self) -> bool:
        return True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        if any(c.survival < 1 for c in candidates):
            return None  # whether one could be spared depends on who was stopped, and so on tail draws
        selected = [c for c in candidates if c.selected_as is not None]
        short = sum(c.selected_as is SelectedAs.SHORT for c in selected)
        sampled, rest = len(selected) - short, len(candidates) - short
        if rest and not sampled:  # the tail has no places
            return None
        return {c.index: 1.0 if c.selected_as is SelectedAs.SHORT else rest / sampled for c in selected}

    def begin(self, deliver_early: bool) -> Assessment:
        return SampledTailAssessment(self.num_shortest, self.num_longest, deliver_early)


class SampledTailAssessment(Assessment):
    """The K shortest valid candidates are in the group and, of all others, the L with the lowest tail draws.

    Candidates that have passed the K-th shortest are stopped as soon as L others have a lower draw in every future.
    ``passing``: the places after which a candidate may be stopped, if not those K.
    """

    def __init__(self, num_shortest: int, num_longest: int, deliver_early: bool, passing: int | None = None) -> None:
        super().__init__()
        self.places = ShortestPlaces(num_shortest, self.standings)
        self.passing = ShortestPlaces(num_shortest if passing is None else passing, self.standings)
        self.candidates: dict[int, Candidate] = {}
        self._num_longest = num_longest
        self._deliver_early = deliver_early
        self._lower = LowerDraws()
        self._passed: list[Draw] = []  # running candidates beyond `passing`, lowest draw first
        self._passing_last = self.passing.last  # the threshold that these are beyond
        self._num_certain = 0  # so many of the shortest have their place for certain
        self._rest: list[Draw] = []  # all other candidates, lowest draw first
        self._pending: list[Draw] = []  # the finished ones that are not settled yet
        self._settled: set[int] = set()  # the short ones that were settled since the last call of `newly_settled`

    # --- keeping up to date -------------------------------------------------

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        self.candidates[candidate.index] = candidate
        self._lower.add(candidate)
        draw = candidate.tail_draw, candidate.index
        if candidate.valid and bisect_left(self.standings.valid, candidate.sort_key) < self._num_certain:
            self._num_certain += 1
            self._settled.add(candidate.index)
        else:
            insort(self._rest, draw)
            if not candidate.running:
                insort(self._pending, draw)
        self._find_passed(candidate)

    def remove(self, index: int) -> None:
        if index not in self.candidates:
            return
        super().remove(index)
        draw = self.candidates.pop(index).tail_draw, index
        self._lower.remove(index)
        for draws in (self._rest, self._pending, self._passed):
            remove_sorted(draws, draw)

    def _find_passed(self, candidate: Candidate) -> None:
        """Note who has passed: ``candidate`` by its own length, others because the threshold came down."""
        last, before = self.passing.last, self._passing_last
        if last is None:
            return
        if candidate.running and candidate.sort_key > last:
            insort(self._passed, (candidate.tail_draw, candidate.index))
        elif last != before:
            running = self.standings.running
            end = len(running) if before is None else bisect_left(running, before)
            for _, index in running[bisect_left(running, last) : end]:
                insort(self._passed, (self.candidates[index].tail_draw, index))
            self._passing_last = last

    def _find_certain(self) -> None:
        """Move the boundary between the shortest that are certain and the rest. It moves back for new candidates."""
        valid = self.standings.valid
        while self._num_certain < min(self.places.places, len(valid)) and self.places.is_certain(self._num_certain):
            index = valid[self._num_certain][1]
            self._num_certain += 1
            self._settled.add(index)
            for draws in (self._rest, self._pending):
                remove_sorted(draws, (self.candidates[index].tail_draw, index))
        while self._num_certain and not self.places.is_certain(self._num_certain - 1):
            self._num_certain -= 1
            index = valid[self._num_certain][1]
            insort(self._rest, (self.candidates[index].tail_draw, index))
            if index in self._settled:
                self._settled.remove(index)
                insort(self._pending, (self.candidates[index].tail_draw, index))

    # --- the tail -----------------------------------------------------------

    @property
    def shortest_are_certain(self) -> bool:
        """Whether all K are."""
        self._find_certain()
        return self._num_certain == self.places.places

    @property
    def last_draw(self) -> float:
        """Highest tail draw that is in the group for certain: the L-th lowest but for those surely among the K.

        Places for the shortest that no valid one can take any more are also for the tail.
        """
        self._find_certain()
        can_be_valid = len(self.standings.valid) + len(self.standings.running)
        sampled = self._num_longest + max(0, self.places.places - can_be_valid)
        if not sampled:
            return -inf
        return self._rest[sampled - 1][0] if len(self._rest) >= sampled else inf

    def winners(self) -> list[Candidate]:
        """Return those with such a draw, at most L unless some are equal. They may yet turn out to be short."""
        return [self.candidates[index] for _, index in self._rest[: bisect_right(self._rest, (self.last_draw, inf))]]

    def fewest_ahead(self, tail_draw: float) -> int:
        """Return how many candidates outside the K places will have a lower tail draw, in the best case for this one.

        The best case is that as many as possible of those with a lower draw are among the K. For s running ones to get
        places, they must finish before the last s finished ones of the first K, and it is those s that lose their
        places. Of finished ones that lose theirs at most one has a lower draw for each running one that gets it, so the
        best s is the largest for which there are s running ones with a lower draw.
        """
        lower = self._lower.below(tail_draw)
        valid, places = self.standings.valid, self.places.places

        def is_too_many(s: int) -> bool:
            return bisect_left(lower.running, valid[places - s]) < s

        placed = bisect_left(range(1, places + 1), True, key=is_too_many)
        kept = places - placed
        staying = bisect_left(lower.valid, valid[kept]) if kept < len(valid) else len(lower.valid)
        return len(lower) - placed - staying

    # --- what is certain ----------------------------------------------------

    def hopeless(self) -> dict[int, DiscardReason]:
        losers = {}
        for tail_draw, index in reversed(self._passed):  # whoever has a higher draw has more ahead
            if self.fewest_ahead(tail_draw) < self._num_longest:
                break
            losers[index] = DiscardReason.TAIL_PRUNED
        return losers

    def newly_settled(self) -> list[int]:
        within = bisect_right(self._pending, (self.last_draw, inf))
        winners = [draw for draw in self._pending[:within] if self.is_settled(self.candidates[draw[1]])]
        for draw in winners:
            remove_sorted(self._pending, draw)
        settled, self._settled = self._settled, set()
        return [*settled, *(index for _, index in winners)]

    def is_settled(self, winner: Candidate) -> bool:
        """Whether a finished winner is in the group: an invalid one only in the tail, once the K places are taken."""
        return winner.valid or self.places.is_full

    def check_at(self) -> dict[int, int]:
        """Falling behind the K-th shortest counts; behind any of the K, for those with a draw that may decide the tail.

        These are all with a lower draw than a candidate that has passed and is not hopeless. For early delivery, where
        each of the K is settled on its own, these are all.
        """
        decisive = inf if self._deliver_early else self._passed[-1][0] if self._passed else -inf
        checks = {}
        for contender in self.places.contenders:
            tokens = self.places.check_at(contender, self.candidates[contender[1]].tail_draw < decisive)
            if tokens is not None:
                checks[contender[1]] = tokens
        return checks


class LowerDraws:
    """The candidates with a tail draw below a limit, in the order of lengths.

    When the limit moves, the candidates that it passes over are added or removed. It hardly moves far: it is read for
    candidates that have passed the K shortest and are not hopeless, which have the lowest draws of all that have.
    """

    def __init__(self) -> None:
        self._candidates: dict[int, Candidate] = {}
        self._by_draw: list[Draw] = []
        self._limit = -inf
        self._lower = Standings()

    def add(self, candidate: Candidate) -> None:
        self._candidates[candidate.index] = candidate
        insort(self._by_draw, (candidate.tail_draw, candidate.index))
        if candidate.tail_draw < self._limit:
            self._lower.add(candidate)

    def remove(self, index: int) -> None:
        remove_sorted(self._by_draw, (self._candidates.pop(index).tail_draw, index))
        self._lower.remove(index)

    def below(self, limit: float) -> Standings:
        """Move the limit, and return the candidates below it."""
        before, after = (bisect_left(self._by_draw, (draw, -1)) for draw in (self._limit, limit))
        for _, index in self._by_draw[before:after]:
            self._lower.add(self._candidates[index])
        for _, index in self._by_draw[after:before]:
            self._lower.remove(index)
        self._limit = limit
        return self._lower


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, of these only the first D tokens. An extension of ours.

    It hides nothing from the trainer: a trajectory that ran on beyond the deadline is returned as a truncated one.
    Candidates that lost the tail run until they pass the M-th shortest rather than the K-th, since the deadline is at
    least the M-th shortest length, which must be known.

    ``last_needed``: whose length the deadline is at least, if not the M-th shortest's.
    """

    last_needed: int | None = None

    @property
    def completion_place(self) -> int:
        return self.size if self.last_needed is None else self.last_needed

    def begin(self, deliver_early: bool) -> Assessment:
        return CutTailAssessment(self.num_shortest, self.num_longest, deliver_early, self.completion_place)


class CutTailAssessment(SampledTailAssessment):
    """The same, but of the tail only the first D tokens are in the group.

    D is at least the length of the shortest at ``completion_place``. Candidates that lost the tail run until they pass
    that one, whose length must be known. While it may still come down, and the deadline with it, whoever may be cut is
    not settled.
    """

    has_deadline = True

    def __init__(self, num_shortest: int, num_longest: int, deliver_early: bool, completion_place: int) -> None:
        super().__init__(num_shortest, num_longest, deliver_early, passing=completion_place)

    @property
    def _own_deadline(self) -> int | None:
        """The group's deadline once it is final; ``None`` before.

        Without enough valid candidates it is the bound; ``None`` without one.
        """
        if self.deadline is None or self.passing.num_contenders:
            return None
        last = self.standings.nth_shortest(self.passing.places)
        if last is None:
            return self.bound
        own = max(self.deadline, last)
        return own if self.bound is None else min(own, self.bound)

    def is_settled(self, winner: Candidate) -> bool:
        may_be_cut = self.deadline is not None and winner.tokens > self.deadline and self.passing.num_contenders
        return super().is_settled(winner) and not may_be_cut

    def hopeless(self) -> dict[int, DiscardReason]:
        if self.shortest_are_certain and all(not c.running and self.is_settled(c) for c in self.winners()):
            return {index: DiscardReason.TAIL_PRUNED for _, index in self.standings.running}
        return super().hopeless()

    def cuts(self) -> dict[int, int]:
        own = self._own_deadline
        if own is None:
            return {}
        return {c.index: own for c in self.winners() if (c.tokens >= own if c.running else c.tokens > own)}

    def check_at(self) -> dict[int, int]:
        own = self._own_deadline
        if own is not None:
            # Losers were stopped. The key of a running candidate is one token more than it has.
            return {index: own for tokens, index in self.standings.running if tokens <= own}
        # Where a candidate has a check for both the M and the K shortest, that for the K shortest comes first.
        checks = {**self.passing.checks(at_every_place=False), **super().check_at()}
        bound = None if self.deadline is None else self.bound
        if bound is None:
            return checks
        return {index: min(bound, checks.get(index, bound)) for _, index in self.standings.running}
