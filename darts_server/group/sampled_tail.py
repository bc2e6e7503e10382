"""Selection rules whose tail is sampled by random numbers that are drawn before any candidate runs.

The deadline D of a `CutTail` group is the deadline of its cohort, but at least the length of its own M-th shortest
valid candidate, so that a prompt has the time for long answers. The cut length acts as a length limit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from darts_server.group.candidate import Candidate
from darts_server.group.selection import Key, SelectionRule, Selector
from darts_server.types import DiscardReason, SelectedAs


class SampledTailSelector(Selector):
    """Selects the K shortest valid candidates, and from all others the L candidates with the lowest tail draws."""

    def select(self) -> dict[int, SelectedAs]:
        num_shortest = self.rule.num_shortest
        selection = {index: SelectedAs.SHORT for _, index in self.valid_by_length[:num_shortest]}
        truncated_as = SelectedAs.LONG_TRUNCATED
        if len(selection) < num_shortest:
            truncated_as = SelectedAs.FILL

        # The lowest draws of the rest get the tail, and the places of the shortest that no valid candidate takes.
        rest = self._sort_by_draw(self.valid_by_length[num_shortest:] + self.truncated_by_length)
        for candidate in rest[: self.rule.size - len(selection)]:
            is_truncated = not candidate.is_valid and not candidate.cut
            selection[candidate.index] = truncated_as if is_truncated else SelectedAs.LONG
        return selection

    def _sort_by_draw(self, keys: Sequence[Key]) -> list[Candidate]:
        return sorted((self.candidates[index] for _, index in keys), key=attrgetter("tail_draw"))

    def _tail_only_candidates(self) -> list[Candidate]:
        """Return running candidates that can only be selected for the tail, the lowest draw first."""
        # The group's deadline may depend on the candidate at `completion_place`, so contenders for that place run on.
        place = self.rule.num_shortest
        if self.has_deadline:
            place = self.rule.completion_place
        return self._sort_by_draw(self.running_by_length[self.count_contenders(place) :])

    # --- the tail -----------------------------------------------------------

    def num_certainly_short(self) -> int:
        """Return the number of valid candidates that are certain to be among the K shortest."""
        num_shortest = self.rule.num_shortest

        def is_uncertain(rank: int) -> bool:
            may_be_shorter = bisect_left(self.running_by_length, self.valid_by_length[rank])
            return rank + may_be_shorter >= num_shortest

        # If a candidate is certain, all shorter candidates are certain too.
        ranks = range(min(num_shortest, len(self.valid_by_length)))
        return bisect_left(ranks, True, key=is_uncertain)

    def _tail_winners(self) -> list[Candidate]:
        """Return the candidates whose tail draws win a place, if they do not end among the K shortest."""
        # Places of the shortest that no valid candidate can take belong to the tail.
        can_be_valid = len(self.valid_by_length) + len(self.running_by_length)
        tail_places = self.rule.num_longest + max(0, self.rule.num_shortest - can_be_valid)

        # The lowest draws win, among all candidates that are not certain to be short. Equal draws win together.
        uncertain = self.valid_by_length[self.num_certainly_short() :]
        by_draw = self._sort_by_draw(uncertain + self.running_by_length + self.truncated_by_length)
        highest_winning_draw = max((c.tail_draw for c in by_draw[:tail_places]), default=-inf)
        return [c for c in by_draw if c.tail_draw <= highest_winning_draw]

    def _min_lower_draws_outside_short(self, candidate: Candidate) -> int:
        """Return the smallest possible number of candidates outside the K places with a lower draw."""
        # The number is smallest if as many running candidates with a lower draw as possible get one of the K places.
        # Each displaces the longest finished candidate there, which has a lower draw or not, so the number never grows.
        tail_draw = candidate.tail_draw
        places = self.rule.num_shortest
        candidates = self.candidates
        lower_running = [key for key in self.running_by_length if candidates[key[1]].tail_draw < tail_draw]
        displaced = 0
        # There are tail-only candidates, so valid candidates take all K places.
        while displaced < places:
            longest_short = self.valid_by_length[places - displaced - 1]
            num_maybe_shorter = bisect_left(lower_running, longest_short)
            if num_maybe_shorter <= displaced:
                break
            displaced += 1
        lower = len(lower_running) - displaced
        lower += sum(candidates[index].tail_draw < tail_draw for _, index in self.valid_by_length[places - displaced :])
        lower += sum(candidates[index].tail_draw < tail_draw for _, index in self.truncated_by_length)
        return lower

    # --- what is certain ----------------------------------------------------

    def stops(self) -> dict[int, DiscardReason]:
        # A candidate has lost the tail once L candidates outside the K places certainly have lower draws. Their number
        # does not fall along `by_draw`, so the last candidate alone shows the usual case that none has lost.
        by_draw = self._tail_only_candidates()
        tail_places = self.rule.num_longest
        if not by_draw or self._min_lower_draws_outside_short(by_draw[-1]) < tail_places:
            return {}
        first_loser = bisect_left(by_draw, tail_places, key=self._min_lower_draws_outside_short)
        return {loser.index: DiscardReason.TAIL_PRUNED for loser in by_draw[first_loser:]}

    def take_deliveries(self) -> list[int]:
        short = [index for _, index in self.valid_by_length[: self.num_certainly_short()]]
        tail = [winner.index for winner in self._tail_winners() if not winner.is_running and self._is_final(winner)]
        return short + tail

    def _is_final(self, winner: Candidate) -> bool:
        # While valid candidates are missing, it is open whether a truncated winner is `LONG_TRUNCATED` or `FILL`.
        return winner.is_valid or len(self.valid_by_length) >= self.rule.num_shortest

    def compute_checks(self) -> dict[int, int]:
        # A candidate with a lower draw than a tail-only candidate may decide the tail, so it is checked at each of the
        # K shortest. With early delivery all candidates are, because each of the K shortest becomes certain separately.
        places = self.rule.num_shortest
        checks = self.elimination_checks(places)
        highest_draw = inf
        if not self.deliver_early:
            highest_draw = max((c.tail_draw for c in self._tail_only_candidates()), default=0.0)
        for key in self.running_by_length[: self.count_contenders(places)]:
            index = key[1]
            if self.candidates[index].tail_draw < highest_draw:
                tokens = self.next_rank_check(key, places)
                if tokens is not None:
                    checks[index] = tokens
        return checks


class CutTailSelector(SampledTailSelector):
    """Selects like a sampled tail, but keeps only the first D tokens of a tail candidate.

    The length at ``completion_place`` must be known, so candidates that lost the tail run until they are longer.
    """

    has_deadline = True

    def _final_deadline(self) -> int | None:
        """Return the group's deadline D in tokens, or None while it may still change."""
        place = self.rule.completion_place
        # A running candidate that can still get to this place may lower D.
        if self.deadline is None or self.count_contenders(place) > 0:
            return None
        completion_length = self.nth_shortest_length(place)
        if completion_length is None:
            # Too few candidates are valid, so only the cut length remains.
            return self.cut_length
        deadline = max(self.deadline, completion_length)
        if self.cut_length is not None:
            deadline = min(deadline, self.cut_length)
        return deadline

    def _is_final(self, winner: Candidate) -> bool:
        if winner.index in self.delivered:
            # Delivered before there was a deadline.
            return True
        # The group's own deadline may still fall, and cut a late winner.
        is_late = self.deadline is not None and winner.tokens > self.deadline
        if is_late and self.count_contenders(self.rule.completion_place) > 0:
            return False
        return super()._is_final(winner)

    def stops(self) -> dict[int, DiscardReason]:
        are_short_certain = self.num_certainly_short() == self.rule.num_shortest
        if are_short_certain and all(not c.is_running and self._is_final(c) for c in self._tail_winners()):
            return {index: DiscardReason.TAIL_PRUNED for _, index in self.running_by_length}
        return super().stops()

    def cuts(self) -> dict[int, int]:
        deadline = self._final_deadline()
        if deadline is None:
            return {}
        cuts = {}
        for winner in self._tail_winners():
            min_length = winner.tokens + 1 if winner.is_running else winner.tokens
            if min_length > deadline:
                cuts[winner.index] = deadline
        return cuts

    def compute_checks(self) -> dict[int, int]:
        deadline = self._final_deadline()
        if deadline is not None:
            # Only winners still run.
            return {index: deadline for min_length, index in self.running_by_length if min_length <= deadline}
        # The check for the K shortest comes first, so it replaces the check for `completion_place`.
        checks = {**self.elimination_checks(self.rule.completion_place), **super().compute_checks()}
        if self.cut_length is None:
            return checks
        return {index: min(self.cut_length, checks.get(index, self.cut_length)) for _, index in self.running_by_length}


# --- the rules ----------------------------------------------------------------


class SampledTail(SelectionRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    Because the random numbers are drawn before any candidate runs, the winners of the tail are certain as soon as the
    K shortest are, and the other candidates can be stopped. Later draws would favour candidates that finish early.

    A sampled candidate stays in the group however it ends. Replacing a candidate at the length limit would hide from
    the trainer that long answers earn nothing. If fewer than K candidates are valid, the other places are sampled too.
    """

    __slots__ = ()
    selector_type = SampledTailSelector
    samples_rest = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        short_weights = {}
        sampled = []
        for candidate in candidates:
            if candidate.survival < 1:
                # Pruning depends on stopped candidates, and so on tail draws.
                return {}
            if candidate.selected_as is SelectedAs.SHORT:
                short_weights[candidate.index] = 1.0
            elif candidate.selected_as is not None:
                sampled.append(candidate.index)
        num_rest = len(candidates) - len(short_weights)
        if num_rest and not sampled:
            # The tail has no places, so the rest can never be selected.
            return {}
        return short_weights | dict.fromkeys(sampled, num_rest / max(len(sampled), 1))


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, cut to their first D tokens. An extension of ours.

    ``completion_rank``: rank of the candidate whose length is the smallest possible deadline, or None for M.
    """

    completion_rank: int | None = None
    selector_type = CutTailSelector

    @property
    def completion_place(self) -> int:
        return self.size if self.completion_rank is None else self.completion_rank
