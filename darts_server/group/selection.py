"""Selection rules: which candidates of a prompt make the group, and what is certain while some of them still run.

Selectors read only lengths, validity (finished at a stop token and not at the length limit), indices, tail draws and
the deadline. The order in which candidates finish does not matter. Only the rule in `informative` reads rewards.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from darts_server.group.candidate import Candidate
from darts_server.types import DiscardReason, SelectedAs

Key = tuple[int, int]
"""(length, index), the order that all rules share. The lower index wins a tie."""


# --- what every rule has ----------------------------------------------------


class Selector:
    """Keeps the candidates of a group in order, and selects among them. This base class selects all.

    All methods but `update` and `take_deliveries` are queries. All answers hold whatever the running candidates do,
    unless they fail.

    ``deliver_early``: whether `take_deliveries` is called before the group is complete. It needs more checks.
    """

    has_deadline: ClassVar[bool] = False
    """Whether the rule uses the deadline and the cut length."""

    def __init__(self, rule: "SelectionRule", deliver_early: bool) -> None:
        self.rule = rule
        self.deliver_early = deliver_early
        self.candidates: dict[int, Candidate] = {}
        """Candidates that are not discarded, by index."""
        # Keys in order, the shortest candidate first.
        self.running_by_length: list[Key] = []
        self.valid_by_length: list[Key] = []
        self.truncated_by_length: list[Key] = []
        self._entries: dict[int, tuple[list[Key], Key]] = {}
        self.cached_checks: dict[int, int] | None = None
        """The latest result of `compute_checks`, or None after a change."""
        self.delivered: Collection[int] = ()
        """Indices of delivered candidates. They keep all their tokens."""
        # Both are from `DeadlineSet`.
        self.deadline: int | None = None
        self.cut_length: int | None = None
        self.sampling_start = 0.0
        """Start of systematic sampling in [0, 1), for rules that need rewards."""

    def update(self, candidate: Candidate) -> None:
        """Move a changed candidate to its place, or remove it if it was discarded."""
        index = candidate.index
        self.cached_checks = None
        if index in self._entries:
            keys, key = self._entries.pop(index)
            del keys[bisect_left(keys, key)]
            del self.candidates[index]
        if not candidate.is_alive:
            return
        key = (candidate.tokens, index)
        if candidate.is_running:
            # The earliest place that the candidate can get: it will have at least one token more.
            keys = self.running_by_length
            key = (candidate.tokens + 1, index)
        elif candidate.is_valid:
            keys = self.valid_by_length
        else:
            keys = self.truncated_by_length
        insort(keys, key)
        self._entries[index] = (keys, key)
        self.candidates[index] = candidate

    # --- the order of lengths -------------------------------------------------

    def nth_shortest_length(self, n: int) -> int | None:
        """Return the length of the ``n``-th shortest valid candidate, counted from 1."""
        if len(self.valid_by_length) < n:
            return None
        return self.valid_by_length[n - 1][0]

    def min_nth_shortest_length(self, n: int, generated: Mapping[int, int]) -> int | None:
        """Return the smallest length that the ``n``-th shortest valid candidate can have in the end.

        ``generated``: tokens of running candidates so far, by index.
        """
        lengths = [length for length, _ in self.valid_by_length]
        for min_length, index in self.running_by_length:
            lengths.append(max(min_length, generated.get(index, 0) + 1))
        if len(lengths) < n:
            return None
        return sorted(lengths)[n - 1]

    def count_contenders(self, places: int) -> int:
        """Return how many running candidates can still be among the ``places`` shortest. They are the shortest."""
        # The `places`-th shortest valid length can only fall, and running candidates can only get longer.
        if len(self.valid_by_length) < places:
            return len(self.running_by_length)
        if places == 0:
            return 0
        return bisect_left(self.running_by_length, self.valid_by_length[places - 1])

    def elimination_checks(self, places: int) -> dict[int, int]:
        """Return the token count at which each contender can no longer be among the ``places`` shortest."""
        if not 0 < places <= len(self.valid_by_length):
            return {}
        last_length, last_index = self.valid_by_length[places - 1]
        contenders = self.running_by_length[: self.count_contenders(places)]
        # A contender will have at least one token more.
        return {index: last_length if index < last_index else last_length - 1 for _, index in contenders}

    def next_rank_check(self, key: Key, places: int) -> int | None:
        """Return the token count at which a running candidate falls behind the next of the ``places`` shortest, or None
        if it is behind all of them.
        """
        rank = bisect_left(self.valid_by_length, key)
        if rank >= min(places, len(self.valid_by_length)):
            return None
        next_length, next_index = self.valid_by_length[rank]
        return next_length if key[1] < next_index else next_length - 1

    # --- what is certain ------------------------------------------------------

    def select(self) -> dict[int, SelectedAs]:
        """Select among the finished candidates. Fewer than ``size`` are selected only if fewer have finished."""
        return {index: SelectedAs.SURVIVOR for _, index in self.valid_by_length + self.truncated_by_length}

    def stops(self) -> dict[int, DiscardReason]:
        """Return the running candidates that can no longer be in the group, with the reason."""
        return {}

    def cuts(self) -> dict[int, int]:
        """Return the candidates, running or finished, that must be cut, and the number of tokens that they keep."""
        return {}

    def take_deliveries(self) -> list[int]:
        """Return finished candidates that are certain to be in the group. Earlier results may be missing."""
        return []

    def compute_checks(self) -> dict[int, int]:
        """Return the token count of each running candidate at which another query may change its answer.

        Apply `stops` first.
        """
        return {}


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """``num_shortest`` (K) places for the shortest candidates, ``num_longest`` (L) for the tail."""

    num_shortest: int
    num_longest: int = 0
    selector_type: ClassVar[type[Selector]] = Selector
    samples_rest: ClassVar[bool] = False
    """Whether the rule selects the K shortest, and samples the other places from all other candidates."""
    samples_survivors: ClassVar[bool] = False
    """Whether a complete group is a plain sample of all candidates that were not pruned."""
    needs_rewards: ClassVar[bool] = False
    """Whether the rule selects by rewards, so that a group waits for the verdicts of all finished candidates."""

    @property
    def size(self) -> int:
        """Number of returned trajectories (M)."""
        return self.num_shortest + self.num_longest

    @property
    def min_remaining(self) -> int:
        """Number of candidates that pruning and failures must leave."""
        return self.size

    @property
    def completion_place(self) -> int:
        """Rank of the valid candidate, from 1, at whose length the group could be complete without its tail."""
        return self.size

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        """Return why a finished candidate was not selected."""
        return DiscardReason.MIDDLE if candidate.is_valid else DiscardReason.TRUNCATED

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        """Return 1 / (probability to be selected) of each selected candidate of a complete group, by index.

        The probability is over tail draws and pruning, given the lengths that all ``candidates``, stopped candidates
        included, would have reached. Empty if some candidates can never be selected, because no weights make up for
        them.
        """
        if any(c.selected_as is None or c.survival < 1 for c in candidates):
            return {}
        return {c.index: 1.0 for c in candidates}

    def advantages(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        """Return the advantages of selected candidates by index, if the rule computes any."""
        return {}


# --- no shaping -------------------------------------------------------------


class InOrderSelector(Selector):
    def select(self) -> dict[int, SelectedAs]:
        finished_indices = sorted(index for _, index in self.valid_by_length + self.truncated_by_length)
        return dict.fromkeys(finished_indices[: self.rule.size], SelectedAs.SHORT)

    def stops(self) -> dict[int, DiscardReason]:
        # A running candidate may still fail, so only finished candidates can make later candidates superfluous.
        num_finished = len(self.valid_by_length) + len(self.truncated_by_length)
        if not self.running_by_length or num_finished < self.rule.size:
            return {}
        last_selected = max(self.select())
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in self.running_by_length if index > last_selected}

    def take_deliveries(self) -> list[int]:
        # If one of the first fails, the others stay among the first.
        first_indices = sorted(self.candidates)[: self.rule.size]
        return [index for index in first_indices if not self.candidates[index].is_running]


class InOrder(SelectionRule):
    """Select the first candidates by index, however they finished: no shaping."""

    __slots__ = ()
    selector_type = InOrderSelector

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        # The selected candidates were chosen before any candidate ran, so they are a plain sample.
        return {c.index: 1.0 for c in candidates if c.selected_as is not None}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE


# --- the shortest, and the longest ------------------------------------------


class DualEndSelector(Selector):
    def __init__(self, rule: "SelectionRule", deliver_early: bool) -> None:
        super().__init__(rule, deliver_early)
        # Valid candidates that `take_deliveries` has not returned, the shortest first.
        self._undelivered_by_length: list[Key] = []

    def update(self, candidate: Candidate) -> None:
        super().update(candidate)
        if candidate.is_valid:
            insort(self._undelivered_by_length, (candidate.tokens, candidate.index))

    def select(self) -> dict[int, SelectedAs]:
        num_shortest = self.rule.num_shortest
        selection = {index: SelectedAs.SHORT for _, index in self.valid_by_length[:num_shortest]}
        # The longest are at the end. With fewer than K + L valid candidates, the two parts must not overlap.
        first_longest = max(num_shortest, len(self.valid_by_length) - self.rule.num_longest)
        for _, index in self.valid_by_length[first_longest:]:
            selection[index] = SelectedAs.LONG
        for _, index in self.truncated_by_length[: self.rule.size - len(selection)]:
            selection[index] = SelectedAs.FILL
        return selection

    def stops(self) -> dict[int, DiscardReason]:
        if self.rule.num_longest:
            # Any running candidate may become the longest.
            return {}
        num_contenders = self.count_contenders(self.rule.num_shortest)
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in self.running_by_length[num_contenders:]}

    def take_deliveries(self) -> list[int]:
        # Only the shortest and the longest candidates can be certain of a place.
        certain_indices = []
        keys = self._undelivered_by_length
        while keys and self._is_certain(keys[0]):
            certain_indices.append(keys.pop(0)[1])
        while keys and self._is_certain(keys[-1]):
            certain_indices.append(keys.pop()[1])
        return certain_indices

    def compute_checks(self) -> dict[int, int]:
        places = self.rule.num_shortest
        if not self.deliver_early:
            # With places for the longest, `stops` stops no candidate.
            return {} if self.rule.num_longest else self.elimination_checks(places)
        # Each place that a candidate falls behind may make another candidate certain.
        checks = {}
        for key in self.running_by_length[: self.count_contenders(places)]:
            tokens = self.next_rank_check(key, places)
            if tokens is not None:
                checks[key[1]] = tokens
        return checks

    def _is_certain(self, key: Key) -> bool:
        # A valid candidate is left out only if at least K valid candidates are shorter and at least L are longer. Every
        # running candidate may become longer, and only running candidates that are shorter so far may stay shorter.
        num_shorter = bisect_left(self.valid_by_length, key)
        num_longer = len(self.valid_by_length) - num_shorter - 1
        missing_shorter = max(0, self.rule.num_shortest - num_shorter)
        missing_longer = max(0, self.rule.num_longest - num_longer)
        may_stay_shorter = bisect_left(self.running_by_length, key)
        return missing_shorter > may_stay_shorter or missing_shorter + missing_longer > len(self.running_by_length)


class DualEnd(SelectionRule):
    """Select the K shortest and the L longest valid candidates (DARTS, distribution-aware trajectory sampling).

    If fewer than K + L candidates are valid, the shortest invalid candidates fill up.

    L = 0 is the rule for saturated prompts (DARTS, variance-guided tail pruning): candidates beyond the K-th shortest
    are stopped. With L >= 1 all finish.
    """

    __slots__ = ()
    selector_type = DualEndSelector

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        if candidate.is_valid and not self.num_longest:
            return DiscardReason.LONGER_THAN_NEEDED
        return super().discard_reason(candidate)


# --- survivors of pruning, whatever their lengths ---------------------------


class AllSurvivors(SelectionRule):
    """Select all candidates that were not pruned, for trainers that take groups of any size (ARRoL).

    ``size`` is the caller's group size.
    """

    __slots__ = ()

    @property
    def min_remaining(self) -> int:
        return 1

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        return {c.index: 1 / c.survival for c in candidates if c.selected_as is not None}


class SampledSurvivorsSelector(Selector):
    def select(self) -> dict[int, SelectedAs]:
        survivors = self.valid_by_length + self.truncated_by_length
        by_draw = sorted((self.candidates[index].tail_draw, index) for _, index in survivors)
        return {index: SelectedAs.SURVIVOR for _, index in by_draw[: self.rule.size]}


class SampledSurvivors(SelectionRule):
    """Select the ``size`` candidates with the lowest tail draws that were not pruned.

    Survivors that lose the draw run on. Stopping them would let pruning, which depends on how many candidates are left,
    depend on tail draws, and the weights would not be exact.
    """

    __slots__ = ()
    selector_type = SampledSurvivorsSelector
    samples_survivors = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float]:
        selected = [c for c in candidates if c.selected_as is not None]
        num_survivors = sum(c.reason is not DiscardReason.PRUNED for c in candidates)
        survivors_per_selected = num_survivors / len(selected)
        return {c.index: survivors_per_selected / c.survival for c in selected}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE
