"""Selection rules whose tail is sampled by random numbers that are drawn before any candidate runs.

`CutTail` has a deadline. The deadline D of a group is the deadline of its cohort, but at least the length of its own
M-th shortest valid candidate, so that a prompt has the time for long answers. Every candidate is cut at the cut length,
which is set with the deadline, as if it were the length limit.
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
    """Selects the K shortest valid candidates, and from all others the L candidates with the lowest tail draws.

    A candidate beyond the K-th shortest is stopped as soon as L other candidates outside the K places certainly have a
    lower draw. With a deadline, ``completion_place`` takes the place of K.
    """

    def select(self) -> dict[int, SelectedAs]:
        places = self.rule.num_shortest
        selection = {index: SelectedAs.SHORT for _, index in self.valid[:places]}
        # If valid candidates are missing, truncated candidates fill up.
        truncated = SelectedAs.LONG_TRUNCATED if len(selection) == places else SelectedAs.FILL

        # The lowest draws of the rest get the tail, and the places of the shortest that no valid candidate takes.
        for candidate in self._by_draw(self.valid[places:] + self.invalid)[: self.rule.size - len(selection)]:
            is_whole = candidate.valid or candidate.cut
            selection[candidate.index] = SelectedAs.LONG if is_whole else truncated
        return selection

    def _by_draw(self, keys: Sequence[Key]) -> list[Candidate]:
        """Return the candidates with these keys, the lowest tail draw first."""
        return sorted((self.candidates[index] for _, index in keys), key=attrgetter("tail_draw"))

    def _only_in_tail(self) -> list[Candidate]:
        """Return the running candidates that can be selected for the tail alone, the lowest tail draw first."""
        place = self.rule.completion_place if self.has_deadline else self.rule.num_shortest
        return self._by_draw(self.running[self.num_below_threshold(place) :])

    # --- the tail -----------------------------------------------------------

    def num_certain(self) -> int:
        """Return the number of valid candidates that are certain to be among the K shortest."""
        places = self.rule.num_shortest

        def is_uncertain(rank: int) -> bool:
            # Running candidates with fewer tokens so far may still turn out to be shorter.
            may_be_shorter = bisect_left(self.running, self.valid[rank])
            return rank + may_be_shorter >= places

        # If a candidate is certain, all shorter candidates are certain too.
        ranks = range(min(places, len(self.valid)))
        return bisect_left(ranks, True, key=is_uncertain)

    def _winners(self) -> list[Candidate]:
        """Return the candidates whose tail draws win a place, if they do not end among the K shortest."""
        # They have the lowest draws among all candidates that are not certain to be short. Places of the shortest that
        # no valid candidate can take belong to the tail.
        can_be_valid = len(self.valid) + len(self.running)
        sampled = self.rule.num_longest + max(0, self.rule.num_shortest - can_be_valid)
        by_draw = self._by_draw(self.valid[self.num_certain() :] + self.running + self.invalid)
        last = max((c.tail_draw for c in by_draw[:sampled]), default=-inf)
        return [c for c in by_draw if c.tail_draw <= last]

    def _count_lower_draws(self, rival: Candidate) -> int:
        """Return the smallest possible number of candidates outside the K places with a lower draw than ``rival``.

        It does not fall as the draw of ``rival``, a candidate of `_only_in_tail`, rises. So `stops` can bisect.
        """
        # As many running candidates with a lower draw as possible must get a place. If s of them do, they finish before
        # the last s finished candidates of the K shortest, which lose their places. For each of the s, at most one
        # candidate with a lower draw loses its place. So the largest possible s is best.
        tail_draw = rival.tail_draw
        places = self.rule.num_shortest
        candidates = self.candidates
        running = [key for key in self.running if candidates[key[1]].tail_draw < tail_draw]
        gained = 0
        while gained < places and bisect_left(running, self.valid[places - gained - 1]) > gained:
            gained += 1
        lower = len(running) - gained
        lower += sum(candidates[index].tail_draw < tail_draw for _, index in self.valid[places - gained :])
        lower += sum(candidates[index].tail_draw < tail_draw for _, index in self.invalid)
        return lower

    # --- what is certain ----------------------------------------------------

    def stops(self) -> dict[int, DiscardReason]:
        rivals = self._only_in_tail()
        tail_places = self.rule.num_longest
        # A rival has lost the tail once L other candidates certainly have lower draws. The number of lower draws rises
        # along `rivals`. Mostly no rival has lost, and the number of the last rival alone shows it.
        if not rivals or self._count_lower_draws(rivals[-1]) < tail_places:
            return {}
        first_lost = bisect_left(rivals, tail_places, key=self._count_lower_draws)
        return {rival.index: DiscardReason.TAIL_PRUNED for rival in rivals[first_lost:]}

    def take_deliveries(self) -> list[int]:
        short = [index for _, index in self.valid[: self.num_certain()]]
        tail = [winner.index for winner in self._winners() if not winner.running and self._is_final(winner)]
        return short + tail

    def _is_final(self, winner: Candidate) -> bool:
        """Whether a finished winner is certain to be in the group: it is valid, or the K places are taken."""
        return winner.valid or len(self.valid) >= self.rule.num_shortest

    def check_at(self) -> dict[int, int]:
        # Every candidate is checked when it falls behind the K-th shortest. A candidate with a lower draw than a
        # candidate of `_only_in_tail` may decide the tail, so it is checked at each of the K shortest. With early
        # delivery all candidates are, because each of the K shortest becomes certain separately.
        places = self.rule.num_shortest
        checks = self.threshold_checks(places)
        highest_draw = inf
        if not self.deliver_early:
            highest_draw = max((c.tail_draw for c in self._only_in_tail()), default=0.0)
        for key in self.running[: self.num_below_threshold(places)]:
            index = key[1]
            if self.candidates[index].tail_draw < highest_draw:
                tokens = self.next_check(key, places)
                if tokens is not None:
                    checks[index] = tokens
        return checks


class CutTailSelector(SampledTailSelector):
    """Selects like a sampled tail, but keeps only the first D tokens of a tail candidate.

    The length at ``completion_place`` must be known, so candidates that lost the tail run until they are longer. While
    this length may still fall, and D with it, a candidate that may be cut is not final.
    """

    has_deadline = True

    def _final_deadline(self) -> int | None:
        """Return the deadline D of this group in tokens, or None while it may still change."""
        place = self.rule.completion_place
        # While a running candidate can become the M-th shortest, D may fall.
        if self.deadline is None or self.num_below_threshold(place) > 0:
            return None
        completion_length = self.nth_shortest(place)
        if completion_length is None:
            # Too few candidates are valid, so only the cut length remains.
            return self.cut_length
        final = max(self.deadline, completion_length)
        if self.cut_length is not None:
            final = min(final, self.cut_length)
        return final

    def _is_final(self, winner: Candidate) -> bool:
        if winner.index in self.delivered:
            # Delivered before there was a deadline.
            return True
        # The group's own deadline may still fall, and cut a late winner.
        is_late = self.deadline is not None and winner.tokens > self.deadline
        if is_late and self.num_below_threshold(self.rule.completion_place) > 0:
            return False
        return super()._is_final(winner)

    def stops(self) -> dict[int, DiscardReason]:
        # Once all selected candidates are final, the other candidates can be stopped.
        are_short_certain = self.num_certain() == self.rule.num_shortest
        if are_short_certain and all(not c.running and self._is_final(c) for c in self._winners()):
            return {index: DiscardReason.TAIL_PRUNED for _, index in self.running}
        return super().stops()

    def cuts(self) -> dict[int, int]:
        final = self._final_deadline()
        if final is None:
            return {}
        # A running candidate will have at least one token more.
        return {winner.index: final for winner in self._winners() if winner.tokens + winner.running > final}

    def check_at(self) -> dict[int, int]:
        final = self._final_deadline()
        if final is not None:
            # Only winners still run. A running candidate's key has one token more than the candidate.
            return {index: final for tokens, index in self.running if tokens <= final}
        # The check for the K shortest comes before the check for the M shortest.
        checks = {**self.threshold_checks(self.rule.completion_place), **super().check_at()}
        if self.cut_length is None:
            return checks
        return {index: min(self.cut_length, checks.get(index, self.cut_length)) for _, index in self.running}


# --- the rules ----------------------------------------------------------------


class SampledTail(SelectionRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    The random numbers are drawn before any candidate runs. So once the K shortest are certain, the winners of the tail
    are certain too, and the other candidates can be stopped. Later draws would favour candidates that finish early.

    A sampled candidate stays in the group however it ends. Replacing a candidate at the length limit would hide from
    the trainer that long answers earn nothing. If fewer than K candidates are valid, the other places are sampled too,
    so all of the rest have the same probability to be returned.
    """

    __slots__ = ()
    selector_type = SampledTailSelector
    samples_rest = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        weights = {}
        sampled = []
        for candidate in candidates:
            if candidate.survival < 1:
                # Pruning depends on stopped candidates, and so on tail draws: the probability is not known.
                return {}
            if candidate.selected_as is SelectedAs.SHORT:
                weights[candidate.index] = 1.0
            elif candidate.selected_as is not None:
                sampled.append(candidate.index)
        rest = len(candidates) - len(weights)
        if rest and not sampled:
            # The tail has no places, so the rest can never be selected.
            return {}
        return weights | dict.fromkeys(sampled, rest / max(len(sampled), 1))


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, cut to their first D tokens. An extension of ours.

    The rule hides nothing from the trainer: a trajectory beyond the deadline is returned truncated.

    ``last_needed``: rank of the candidate whose length is the smallest possible deadline, or None for M.
    """

    last_needed: int | None = None
    selector_type = CutTailSelector

    @property
    def completion_place(self) -> int:
        return self.size if self.last_needed is None else self.last_needed
