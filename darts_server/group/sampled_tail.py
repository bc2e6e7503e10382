"""Selection rules whose tail is sampled by random numbers that are drawn before any candidate runs.

One of the rules has a deadline. The deadline D of a group is the deadline of its cohort, but at least the length of the
group's own M-th shortest valid candidate, so that a prompt that needs long answers has the time for them. While the
cohort has no deadline, the group has none. A bound may be set with the deadline: every candidate is cut there, as if
the bound were its length limit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from darts_server.group.candidate import Candidate
from darts_server.group.selection import SelectionRule, Selector
from darts_server.types import DiscardReason, SelectedAs


class SampledTailSelector(Selector):
    """Selects the K shortest valid candidates and, of all other candidates, the L with the lowest tail draws.

    A candidate that is longer than the K-th shortest is stopped as soon as L other candidates have a lower draw
    whatever happens. With a deadline, the length that counts is that of the candidate at ``completion_place``.
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

        # The lowest draws of the rest get the tail, and the places of the shortest that no valid candidate takes.
        rest.sort(key=attrgetter("tail_draw"))
        truncated = SelectedAs.FILL if num_short < places else SelectedAs.LONG_TRUNCATED
        for candidate in rest[: self.rule.size - num_short]:
            is_whole = candidate.valid or candidate.cut
            selection[candidate.index] = SelectedAs.LONG if is_whole else truncated
        return selection

    def _beyond(self) -> list[tuple[float, int]]:
        """Return (tail draw, index) of running candidates that cannot be among the shortest, the lowest draw first."""
        place = self.rule.completion_place if self.has_deadline else self.rule.num_shortest
        beyond = self.running[self.num_below_threshold(place) :]
        return sorted((self.candidates[index].tail_draw, index) for _, index in beyond)

    # --- the tail -----------------------------------------------------------

    def num_certain(self) -> int:
        """Return how many valid candidates are among the K shortest whatever the running candidates do."""
        places = self.rule.num_shortest

        def is_uncertain(rank: int) -> bool:
            return rank + bisect_left(self.running, self.valid[rank]) >= places

        # If a candidate is certain, all shorter candidates are certain too.
        ranks = range(min(places, len(self.valid)))
        return bisect_left(ranks, True, key=is_uncertain)

    def _winners(self) -> list[Candidate]:
        """Return the candidates whose tail draw is in the group for certain. They may still turn out to be short.

        The winners are the L candidates with the lowest draws, and candidates with equal draws, among all that are not
        certain to be among the K shortest. Places of the shortest that no valid candidate can take belong to the tail.
        """
        can_be_valid = len(self.valid) + len(self.running)
        sampled = self.rule.num_longest + max(0, self.rule.num_shortest - can_be_valid)
        rest = (*self.valid[self.num_certain() :], *self.running, *self.invalid)
        by_draw = sorted((self.candidates[index] for _, index in rest), key=attrgetter("tail_draw"))
        last = max((c.tail_draw for c in by_draw[:sampled]), default=-inf)
        return [c for c in by_draw if c.tail_draw <= last]

    def _fewest_lower(self, beyond: tuple[float, int]) -> int:
        """Return the smallest possible number of candidates outside the K places that have a lower tail draw.

        ``beyond``: an element of `_beyond`. An element with a higher draw has at least as many candidates below it.

        The number is smallest if as many candidates with a lower draw as possible get a place among the K shortest. If
        s running candidates get such places, they finish before the last s finished candidates of the K shortest, which
        lose their places. At most one of the candidates that lose a place has a lower draw for each running candidate
        that gets a place. So the best s is the largest s for which there are s running candidates with a lower draw.
        """
        tail_draw = beyond[0]
        places = self.rule.num_shortest
        candidates = self.candidates
        running = [key for key in self.running if candidates[key[1]].tail_draw < tail_draw]
        gained = 0
        while gained < places and bisect_left(running, self.valid[places - gained - 1]) > gained:
            gained += 1
        lower = len(running) - gained
        for _, index in (*self.valid[places - gained :], *self.invalid):
            lower += candidates[index].tail_draw < tail_draw
        return lower

    # --- what is certain ----------------------------------------------------

    def stops(self) -> dict[int, DiscardReason]:
        beyond = self._beyond()
        longest = self.rule.num_longest
        if not beyond or self._fewest_lower(beyond[-1]) < longest:
            return {}
        first = bisect_left(beyond, longest, key=self._fewest_lower)
        return {index: DiscardReason.TAIL_PRUNED for _, index in beyond[first:]}

    def deliveries(self) -> list[int]:
        short = [index for _, index in self.valid[: self.num_certain()]]
        tail = [winner.index for winner in self._winners() if not winner.running and self._is_final(winner)]
        return short + tail

    def _is_final(self, winner: Candidate) -> bool:
        """Whether a finished winner is in the group. An invalid one is in the tail, once the K places are taken."""
        return winner.valid or len(self.valid) >= self.rule.num_shortest

    def check_at(self) -> dict[int, int]:
        """Return the token counts at which running candidates fall behind others.

        For every candidate it matters when it falls behind the K-th shortest. For candidates whose draw may decide the
        tail it also matters when they fall behind any of the K shortest. These are all candidates with a lower draw
        than a candidate that is beyond the threshold and not stopped. For early delivery these are all candidates,
        because each of the K shortest becomes certain on its own.
        """
        places = self.rule.num_shortest
        checks = self.threshold_checks(places)
        limit = inf if self.deliver_early else max(self._beyond(), default=(0.0,))[0]
        for key in self.running[: self.num_below_threshold(places)]:
            index = key[1]
            if self.candidates[index].tail_draw < limit:
                tokens = self.next_check(key, places)
                if tokens is not None:
                    checks[index] = tokens
        return checks


class CutTailSelector(SampledTailSelector):
    """Selects as a sampled tail does, but only the first D tokens of a tail candidate are in the group.

    D is at least the length of the candidate at ``completion_place``. Candidates that lost the tail run until they are
    longer than that candidate, because its length must be known. While its length may still fall, and the deadline with
    it, a candidate that may be cut is not final.
    """

    has_deadline = True

    def _own_deadline(self) -> int | None:
        """Return the group's deadline in tokens once it is final, or None before.

        Without enough valid candidates it is the bound.
        """
        if self.deadline is None or self.num_below_threshold(self.rule.completion_place):
            return None
        last = self.nth_shortest(self.rule.completion_place)
        if last is None:
            return self.bound
        own = max(self.deadline, last)
        return own if self.bound is None else min(own, self.bound)

    def _is_final(self, winner: Candidate) -> bool:
        if winner.index in self.delivered:
            # Delivered before there was a deadline.
            return True
        is_late = self.deadline is not None and winner.tokens > self.deadline
        return super()._is_final(winner) and not (is_late and self.num_below_threshold(self.rule.completion_place))

    def stops(self) -> dict[int, DiscardReason]:
        are_short_certain = self.num_certain() == self.rule.num_shortest
        if are_short_certain and all(not c.running and self._is_final(c) for c in self._winners()):
            return {index: DiscardReason.TAIL_PRUNED for _, index in self.running}
        return super().stops()

    def cuts(self) -> dict[int, int]:
        own = self._own_deadline()
        if own is None:
            return {}
        cuts = {}
        for winner in self._winners():
            is_cut = winner.tokens >= own if winner.running else winner.tokens > own
            if is_cut:
                cuts[winner.index] = own
        return cuts

    def check_at(self) -> dict[int, int]:
        own = self._own_deadline()
        if own is not None:
            # Only winners still run. The key of a running candidate is one token more than it has.
            return {index: own for tokens, index in self.running if tokens <= own}
        # If a candidate has a check for both the M and the K shortest, the check for the K shortest comes first.
        checks = {**self.threshold_checks(self.rule.completion_place), **super().check_at()}
        if self.bound is None:
            return checks
        return {index: min(self.bound, checks.get(index, self.bound)) for _, index in self.running}


# --- the rules ----------------------------------------------------------------


class SampledTail(SelectionRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    The random numbers are drawn before any candidate runs. So once the K shortest are certain, the winners of the tail
    are certain too, and the other candidates can be stopped. Random numbers that are drawn later would favour
    candidates that finish early. Drawing them first also makes the group a function of lengths and seed alone.

    A sampled candidate stays in the group however it ends. Replacing a sampled candidate that reaches the length limit
    would hide from the trainer that long answers earn nothing. If fewer than K candidates are valid, their places are
    sampled from the rest too. So all of the rest have the same probability to be returned, in every case.
    """

    __slots__ = ()
    selector_type = SampledTailSelector
    samples_rest = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        weights = {}
        sampled = []
        for candidate in candidates:
            if candidate.survival < 1:
                # Pruning depends on which candidates were stopped, and so on tail draws: the probability is not known.
                return None
            if candidate.selected_as is SelectedAs.SHORT:
                weights[candidate.index] = 1.0
            elif candidate.selected_as is not None:
                sampled.append(candidate.index)
        rest = len(candidates) - len(weights)
        if rest and not sampled:
            # The tail has no places, so the rest can never be selected.
            return None
        return weights | dict.fromkeys(sampled, rest / max(len(sampled), 1))


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, cut to their first D tokens. An extension of ours.

    The rule hides nothing from the trainer: a trajectory that is longer than the deadline is returned as a truncated
    one. Candidates that lost the tail run until they are longer than the M-th shortest and not the K-th, because the
    deadline is at least the M-th shortest length, which must be known.

    ``last_needed``: rank of the candidate whose length is the smallest possible deadline, or None for the M-th
    shortest.
    """

    last_needed: int | None = None
    selector_type = CutTailSelector

    def __post_init__(self) -> None:
        # `super()` does not find the class that a dataclass with slots becomes.
        SampledTail.__post_init__(self)
        if self.last_needed is not None:
            object.__setattr__(self, "completion_place", self.last_needed)
