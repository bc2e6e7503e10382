"""Selection rules whose tail is sampled, by random numbers that are drawn before anything runs; also with a deadline.

The deadline D of a group is that of its cohort, but at least the length of its own M-th shortest valid candidate: a
prompt that needs long answers has the time for them. While the cohort has no deadline the group has none. A bound may
be set with the deadline: then every candidate is cut there, as if it were the length limit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection import SelectionRule, Selector
from darts_server.types import DiscardReason, SelectedAs


class SampledTailSelector(Selector):
    """The K shortest valid candidates are in the group and, of all others, the L with the lowest tail draws.

    Candidates that are longer than the K-th shortest or, with a deadline, than the one that it lets finish, are stopped
    as soon as L others have a lower draw in every future.
    """

    def select(self) -> dict[int, SelectedAs]:
        places = self.rule.num_shortest
        num_short = min(places, len(self.valid))
        selection: dict[int, SelectedAs] = {}
        rest = []
        for rank, (_, index) in enumerate((*self.valid, *self.invalid)):
            if rank < num_short:
                selection[index] = SelectedAs.SHORT
            else:
                rest.append(self.candidates[index])
        # The tail, and places for the shortest that no valid one takes, go to the lowest draws of all others.
        rest.sort(key=attrgetter("tail_draw"))
        truncated = SelectedAs.FILL if num_short < places else SelectedAs.LONG_TRUNCATED
        for c in rest[: self.rule.size - num_short]:
            selection[c.index] = SelectedAs.LONG if c.valid or c.cut else truncated
        return selection

    def _beyond(self) -> list[tuple[float, int]]:
        """Return running candidates that cannot be among the shortest any more, lowest (tail draw, index) first."""
        place = self.rule.completion_place if self.has_deadline else self.rule.num_shortest
        beyond = self.running[self.num_below_threshold(place) :]
        return sorted((self.candidates[index].tail_draw, index) for _, index in beyond)

    # --- the tail -----------------------------------------------------------

    def num_certain(self) -> int:
        """Return how many of the valid ones are among the K shortest, whatever the running ones do."""
        places = self.rule.num_shortest
        ranks = range(min(places, len(self.valid)))  # where one is certain, so are all shorter ones
        return bisect_left(ranks, True, key=lambda rank: rank + bisect_left(self.running, self.valid[rank]) >= places)

    def _winners(self) -> list[Candidate]:
        """Return the candidates whose tail draw is in the group for certain. They may yet turn out to be short.

        These are the L with the lowest draws of those that are not among the K for certain, and any with equal ones.
        Places for the shortest that no valid one can take any more are also for the tail.
        """
        can_be_valid = len(self.valid) + len(self.running)
        sampled = self.rule.num_longest + max(0, self.rule.num_shortest - can_be_valid)
        rest = (*self.valid[self.num_certain() :], *self.running, *self.invalid)
        by_draw = sorted((self.candidates[index] for _, index in rest), key=attrgetter("tail_draw"))
        last = max((c.tail_draw for c in by_draw[:sampled]), default=-inf)
        return [c for c in by_draw if c.tail_draw <= last]

    def _fewest_lower(self, beyond: tuple[float, int]) -> int:
        """Return how many candidates outside the K places will have a lower tail draw, in the best case for this one.

        ``beyond``: an element of `_beyond`; one with a higher draw has at least as many lower ones.

        The best case is that as many as possible of those with a lower draw are among the K. For s running ones to get
        places, they must finish before the last s finished ones of the first K, and it is those s that lose their
        places. Of finished ones that lose theirs at most one has a lower draw for each running one that gets it, so the
        best s is the largest for which there are s running ones with a lower draw.
        """
        tail_draw, places, candidates = beyond[0], self.rule.num_shortest, self.candidates
        running, gained = [], 0
        for key in self.running:
            if candidates[key[1]].tail_draw < tail_draw:
                running.append(key)
        while gained < places and bisect_left(running, self.valid[places - gained - 1]) > gained:
            gained += 1
        lower = len(running) - gained
        for _, index in (*self.valid[places - gained :], *self.invalid):
            lower += candidates[index].tail_draw < tail_draw
        return lower

    # --- what is certain ----------------------------------------------------

    def stops(self) -> dict[int, DiscardReason]:
        beyond, longest = self._beyond(), self.rule.num_longest
        if not beyond or self._fewest_lower(beyond[-1]) < longest:
            return {}
        first = bisect_left(beyond, longest, key=self._fewest_lower)
        return {index: DiscardReason.TAIL_PRUNED for _, index in beyond[first:]}

    def deliveries(self) -> list[int]:
        short = [index for _, index in self.valid[: self.num_certain()]]
        return [*short, *(c.index for c in self._winners() if not c.running and self._is_final(c))]

    def _is_final(self, winner: Candidate) -> bool:
        """Whether a finished winner is in the group: an invalid one only in the tail, once the K places are taken."""
        return winner.valid or len(self.valid) >= self.rule.num_shortest

    def check_at(self) -> dict[int, int]:
        """Falling behind the K-th shortest counts; behind any of the K, for those whose draw may decide the tail.

        These are all with a lower draw than a candidate that is beyond the threshold and not stopped. For early
        delivery, where each of the K is certain on its own, these are all.
        """
        places = self.rule.num_shortest
        checks = self.threshold_checks(places)
        limit = inf if self.deliver_early else max(self._beyond(), default=(0.0,))[0]
        for key in self.running[: self.num_below_threshold(places)]:
            if self.candidates[key[1]].tail_draw < limit and (tokens := self.next_check(key, places)) is not None:
                checks[key[1]] = tokens
        return checks


class CutTailSelector(SampledTailSelector):
    """The same, but of the tail only the first D tokens are in the group.

    D is at least the length of the shortest at ``completion_place``. Candidates that lost the tail run until they are
    longer than that one, whose length must be known. While it may still come down, and the deadline with it, a
    candidate that may be cut is not final.
    """

    has_deadline = True

    def _own_deadline(self) -> int | None:
        """Return the group's deadline once it is final; ``None`` before.

        Without enough valid candidates it is the bound; ``None`` without one.
        """
        if self.deadline is None or self.num_below_threshold(self.rule.completion_place):
            return None
        last = self.nth_shortest(self.rule.completion_place)
        if last is None:
            return self.bound
        own = max(self.deadline, last)
        return own if self.bound is None else min(own, self.bound)

    def _is_final(self, winner: Candidate) -> bool:
        if winner.index in self.delivered:  # before there was a deadline
            return True
        is_late = self.deadline is not None and winner.tokens > self.deadline
        return super()._is_final(winner) and not (is_late and self.num_below_threshold(self.rule.completion_place))

    def stops(self) -> dict[int, DiscardReason]:
        are_certain = self.num_certain() == self.rule.num_shortest
        if are_certain and all(not c.running and self._is_final(c) for c in self._winners()):
            return {index: DiscardReason.TAIL_PRUNED for _, index in self.running}
        return super().stops()

    def cuts(self) -> dict[int, int]:
        own = self._own_deadline()
        if own is None:
            return {}
        return {c.index: own for c in self._winners() if (c.tokens >= own if c.running else c.tokens > own)}

    def check_at(self) -> dict[int, int]:
        own = self._own_deadline()
        if own is not None:
            # Losers were stopped. The key of a running candidate is one token more than it has.
            return {index: own for tokens, index in self.running if tokens <= own}
        # Where a candidate has a check for both the M and the K shortest, that for the K shortest comes first.
        checks = {**self.threshold_checks(self.rule.completion_place), **super().check_at()}
        if self.bound is None:
            return checks
        return {index: min(self.bound, checks.get(index, self.bound)) for _, index in self.running}


# --- the rules ----------------------------------------------------------------


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
    selector_type = SampledTailSelector
    samples_rest = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        weights, sampled = {}, []
        for c in candidates:
            if c.survival < 1:
                return None  # who could be pruned depends on who was stopped, and so on tail draws
            if c.selected_as is SelectedAs.SHORT:
                weights[c.index] = 1.0
            elif c.selected_as is not None:
                sampled.append(c.index)
        rest = len(candidates) - len(weights)
        if rest and not sampled:  # the tail has no places
            return None
        return weights | dict.fromkeys(sampled, rest / max(len(sampled), 1))


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, of these only the first D tokens. An extension of ours.

    It hides nothing from the trainer: a trajectory that ran on beyond the deadline is returned as a truncated one.
    Candidates that lost the tail run until they are longer than the M-th shortest rather than the K-th, since the
    deadline is at least the M-th shortest length, which must be known.

    ``last_needed``: whose length the deadline is at least, if not the M-th shortest's.
    """

    last_needed: int | None = None
    selector_type = CutTailSelector

    def __post_init__(self) -> None:
        SampledTail.__post_init__(self)  # `super()` does not find the class that a dataclass with slots becomes
        if self.last_needed is not None:
            object.__setattr__(self, "completion_place", self.last_needed)
