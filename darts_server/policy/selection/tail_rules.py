"""Selection rules that give some places to longer candidates: two kinds of tail, each also with a deadline.

The deadline D of a group is that of its cohort, but at least the length of its own M-th shortest valid candidate: a
prompt that needs long answers has the time for them. While the cohort has no deadline the group has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.rules import Shortest, Verdict
from darts_server.policy.selection.shortest_places import ShortestPlaces, split_by_validity
from darts_server.types import DiscardReason, SelectedAs


@dataclass(frozen=True, slots=True)
class _TailRule:
    """``num_shortest`` (K) places for the shortest and ``num_longest`` (L) for the tail."""

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class LongestTail(_TailRule):
    """Select the K shortest and the L longest valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may turn out the longest, so with L >= 1 all of them run to their end. If fewer than K + L are
    valid, all of these are selected, and invalid ones fill up, shortest first.
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
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, deliver_early)
        places = ShortestPlaces(self.num_shortest, running, finished)
        settled = (c.index for rank, c in enumerate(places.valid) if self._is_settled(rank, c, places))
        check_at = places.check_at(at_every_place=True) if deliver_early else {}
        return Verdict(settled=frozenset(settled), check_at=check_at)

    def _is_settled(self, rank: int, candidate: Candidate, places: ShortestPlaces) -> bool:
        """Whether no outcome of the running candidates leaves out the finished one at this ``rank`` (from 0).

        It is left out only with at least K valid ones before it and at least L after it. Any running candidate can end
        after it; only those shorter so far can end before it.
        """
        missing_before = max(0, self.num_shortest - rank)
        missing_after = max(0, self.num_longest - (len(places.valid) - rank - 1))
        can_precede = sum(r.sort_key < candidate.sort_key for r in places.running)
        return missing_before > can_precede or missing_before + missing_after > len(places.running)


@dataclass(frozen=True, slots=True)
class SampledTail(_TailRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    The random numbers are drawn before anything runs: once the K shortest are certain, so is who wins among the rest,
    and the others can be stopped. Drawn later, they would favour candidates that finish early. It also makes the group
    a function of lengths and seed alone.

    A sampled candidate stays in the group however it ends. One that hits the length limit is returned and marked as a
    fill: replacing it would hide from the trainer that running on earns nothing. Only if fewer than K are valid do
    invalid ones fill up, shortest first.
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
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        if not running:
            return Verdict(settled=frozenset(self.select(finished)))
        places = ShortestPlaces(self.num_shortest, running, finished)
        short = places.certain()
        winners = self._certain_winners(places, short)
        losers = [r for r in places.passed if places.fewest_ahead(r.tail_draw) >= self.num_longest]
        return Verdict(
            settled=frozenset(short | winners.intersection(c.index for c in finished)),
            hopeless={r.index: DiscardReason.TAIL_PRUNED for r in losers},
            # Falling behind any of the K shortest, not only behind the last one, can decide who wins a tail place.
            check_at=places.check_at(at_every_place=True),
        )

    def _certain_winners(self, places: ShortestPlaces, short: set[int]) -> set[int]:
        """Return the candidates, running or finished, that are in the group for certain and not surely ``short``.

        Either as one of the K shortest after all or, by their tail draw, as one of the tail.
        """
        rest = [c for c in (*places.running, *places.valid, *places.invalid) if c.index not in short]
        return {
            c.index
            for c in rest
            if sum(other.tail_draw < c.tail_draw for other in rest) < self.num_longest and (places.is_full or c.valid)
        }

    def sampled(self, running: Sequence[Candidate], finished: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that are in the group by their tail draw and can no longer be among the K shortest."""
        places = ShortestPlaces(self.num_shortest, running, finished)
        winners = self._certain_winners(places, places.certain())
        return [c for c in places.excluded() if c.index in winners]


@dataclass(frozen=True, slots=True)
class DeadlineTail(_TailRule):
    """Select the K shortest, and the L longest that are no longer than the deadline. An extension of ours.

    Candidates that reach the deadline are stopped.
    """

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        own = _own_deadline(deadline, ShortestPlaces(self.size, [], finished))
        in_time = finished if own is None else [c for c in finished if c.tokens <= own]
        return LongestTail(self.num_shortest, self.num_longest).select(in_time)

    def assess(
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        if not self.num_longest:
            return Shortest(self.size).assess(running, finished, deliver_early)
        places = ShortestPlaces(self.num_shortest, running, finished)
        own = _own_deadline(deadline, ShortestPlaces(self.size, running, finished))
        # The M-th shortest can only come down, and the deadline with it: whoever has passed it has passed it for good.
        late = [r for r in running if own is not None and r.tokens >= own]
        hopeless = {r.index: DiscardReason.TAIL_PRUNED for r in late}
        if len(late) == len(running):
            return Verdict(frozenset(self.select(finished, deadline)), hopeless)
        check_at = places.check_at(at_every_place=True) if deliver_early else {}
        if own is not None:
            check_at = {r.index: min(own, check_at.get(r.index, own)) for r in running}
        return Verdict(frozenset(places.certain()), hopeless, check_at=_without(hopeless, check_at))


@dataclass(frozen=True, slots=True)
class CutTail(_TailRule):
    """Select the K shortest and L sampled from the rest, of these only the first D tokens. An extension of ours.

    It hides nothing from the trainer: a trajectory that ran on beyond the deadline is returned as a truncated one.
    Candidates that lost the tail run until they pass the M-th shortest rather than the K-th, since the deadline is at
    least the M-th shortest length, which must be known.
    """

    @property
    def _uncut(self) -> SampledTail:
        return SampledTail(self.num_shortest, self.num_longest)

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return self._uncut.select(finished)

    def assess(
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        uncut = self._uncut.assess(running, finished, deliver_early)
        all_places = ShortestPlaces(self.size, running, finished)
        own = _own_deadline(deadline, all_places)
        settled = uncut.settled
        cuts: dict[int, int] = {}
        cut_later: dict[int, int] = {}
        if deadline is not None and all_places.contenders:
            # The M-th shortest can still come down, and the deadline with it: whoever may be cut is not settled yet.
            short = ShortestPlaces(self.num_shortest, running, finished).certain()
            settled -= {c.index for c in finished if c.tokens > deadline and c.index not in short}
        elif own is not None:
            sampled = self._uncut.sampled(running, finished)
            cut_later = {c.index: own for c in sampled if c.running and c.tokens < own}
            cuts = {c.index: own for c in sampled if c.index not in cut_later and (c.running or c.tokens > own)}
        if len(settled) == self.size:
            return Verdict(settled, uncut.hopeless, cuts)
        passed = {r.index for r in all_places.passed}
        hopeless = {i: reason for i, reason in uncut.hopeless.items() if i in passed}
        # Where a candidate has a check for both the M and the K shortest, that for the K shortest comes first.
        check_at = {**all_places.check_at(at_every_place=False), **uncut.check_at, **cut_later}
        return Verdict(settled, hopeless, cuts, _without(hopeless, check_at))


def _own_deadline(deadline: int | None, all_places: ShortestPlaces) -> int | None:
    """Return the group's deadline: the cohort's, but at least its own M-th shortest length, once both are known."""
    if deadline is None or all_places.threshold is None:
        return None
    return max(deadline, all_places.threshold)


def _without(hopeless: Mapping[int, DiscardReason], check_at: Mapping[int, int]) -> dict[int, int]:
    """Return the checks of candidates that are not stopped."""
    return {i: tokens for i, tokens in check_at.items() if i not in hopeless}
