"""Selection rules: which candidates of a prompt make the group, and what is certain while some of them still run.

A rule itself is a value. While a group runs, a `Selector` that the rule creates keeps its candidates in order, says
which of them can be stopped or returned early, and selects in the end.

A rule reads only lengths, validity (finished at a stop token rather than at the length limit), indices, tail draws and
the deadline. It never reads a reward or a score, and does not depend on the order in which candidates finish.

All rules share one total order, (length, candidate index): the shortest come first. Rules with a sampled tail are in
`sampled_tail`.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from darts_server.policy.candidate import Candidate
from darts_server.types import DiscardReason, SelectedAs

Key = tuple[int, int]
"""(length, index), the order that all rules share; ties go to the earlier index."""


# --- what every rule has ----------------------------------------------------


class Selector:
    """Follows the candidates of a group, and selects among them.

    The ``running``, the ``valid`` and the ``invalid`` ones are in order, each list shortest first. A candidate that
    changes is moved in O(log n) comparisons. What else a rule needs is found when it is needed, in O(n) at most.

    All methods but `update` are queries. What they say holds whatever the running candidates do, as long as they do not
    fail. A group is complete when nothing runs that cannot be stopped. This base class stops nothing, so its group
    waits for all candidates, and then selects all of them.

    ``deliver_early``: whether `deliveries` is called, before the group is complete; it takes more checks.
    """

    has_deadline: ClassVar[bool] = False
    """Whether the group has a deadline, and a bound. Otherwise both are ignored."""

    def __init__(self, rule: "SelectionRule", deliver_early: bool) -> None:
        self.rule = rule
        self.deliver_early = deliver_early
        self.candidates: dict[int, Candidate] = {}
        """Those that are in the group or may still be, by index."""
        self.running: list[Key] = []
        self.valid: list[Key] = []
        self.invalid: list[Key] = []
        self._entries: dict[int, tuple[list[Key], Key]] = {}  # where each of the candidates is
        self.checks: dict[int, int] | None = None
        """What `check_at` returned, for as long as it holds; ``None`` after a change."""
        self.delivered: Collection[int] = ()
        """Those that were delivered: they are in the group, whole."""
        self.deadline: int | None = None
        """The cohort's deadline in tokens; ``None`` while there is none."""
        self.bound: int | None = None
        """Length at which every candidate is cut; ``None`` while there is none."""

    def update(self, candidate: Candidate) -> None:
        """Take over the present state of a candidate: new, longer, finished, cut or discarded."""
        index = candidate.index
        self.checks = None
        if index in self._entries:
            keys, key = self._entries.pop(index)
            del keys[bisect_left(keys, key)]
            del self.candidates[index]
        if candidate.alive:
            if candidate.running:
                # The earliest place possible: one that was seen running with t tokens will have at least t + 1.
                keys, key = self.running, (candidate.tokens + 1, index)
            else:
                keys, key = self.valid if candidate.valid else self.invalid, (candidate.tokens, index)
            insort(keys, key)
            self._entries[index] = keys, key
            self.candidates[index] = candidate

    # --- the order of lengths -------------------------------------------------

    def nth_shortest(self, n: int) -> int | None:
        """Return the length of the ``n``-th shortest valid candidate, from 1; ``None`` if there are fewer."""
        return self.valid[n - 1][0] if len(self.valid) >= n else None

    def nth_shortest_minimum(self, n: int, generated: Mapping[int, int]) -> int | None:
        """Return the length that the ``n``-th shortest valid candidate has at least; ``None`` if there cannot be one.

        ``generated``: tokens of running candidates so far, by index.
        """
        running = (max(tokens, generated.get(index, 0) + 1) for tokens, index in self.running)
        lengths = sorted([*(tokens for tokens, _ in self.valid), *running])
        return lengths[n - 1] if len(lengths) >= n else None

    def num_below_threshold(self, places: int) -> int:
        """Return how many running candidates can still be among the shortest: they come first in ``running``.

        The threshold is the ``places``-th shortest valid candidate so far; none is beyond it while fewer have finished.
        It can only come down, and a running candidate only gets longer: one that is beyond it stays beyond it. So
        candidates can be stopped before all have finished.
        """
        if len(self.valid) < places:
            return len(self.running)
        return bisect_left(self.running, self.valid[places - 1]) if places else 0

    def threshold_checks(self, places: int) -> dict[int, int]:
        """Return the token count at which each running candidate is beyond the threshold, for those that are not yet.

        Of two equal lengths the earlier index is first, so a later index is beyond it one token earlier.
        """
        if not 0 < places <= len(self.valid):
            return {}
        tokens, last = self.valid[places - 1]
        below = self.running[: self.num_below_threshold(places)]
        return {index: tokens if index < last else tokens - 1 for _, index in below}

    def next_check(self, key: Key, places: int) -> int | None:
        """Return the token count at which a running candidate falls behind the next one that has finished.

        ``None`` if it is behind all of the shortest that have.
        """
        rank = bisect_left(self.valid, key)
        if rank >= min(places, len(self.valid)):
            return None
        tokens, index = self.valid[rank]
        return tokens if key[1] < index else tokens - 1

    # --- what is certain ------------------------------------------------------

    def select(self) -> dict[int, SelectedAs]:
        """Select from those that have finished; fewer than ``size`` only if there are fewer."""
        return dict.fromkeys((index for _, index in (*self.valid, *self.invalid)), SelectedAs.SURVIVOR)

    def stops(self) -> dict[int, DiscardReason]:
        """Running candidates that cannot be in the group any more, and why."""
        return {}

    def cuts(self) -> dict[int, int]:
        """Candidates, running or finished, of which only the first tokens are in the group, and how many."""
        return {}

    def deliveries(self) -> list[int]:
        """Finished candidates that are certain to be in the group; it may leave out those that it has named before."""
        return []

    def check_at(self) -> dict[int, int]:
        """Running candidate -> token count at which anything above may change; progress before that changes nothing.

        Candidates that can be stopped must have been removed.
        """
        return {}


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """How the group is selected: ``num_shortest`` (K) places for the shortest, and ``num_longest`` (L) for the tail."""

    num_shortest: int
    num_longest: int = 0
    selector_type: ClassVar[type[Selector]] = Selector
    """What follows a group and selects."""
    samples_rest: ClassVar[bool] = False
    """Whether the K shortest are selected, and a sample of all others."""
    samples_survivors: ClassVar[bool] = False
    """Whether a complete group is a plain sample of all candidates that were not pruned."""
    size: int = field(init=False, repr=False, compare=False)
    """M: how many trajectories are returned."""
    fewest: int = field(init=False, repr=False, compare=False)
    """How many candidates must be left of those that are pruned or fail."""
    completion_place: int = field(init=False, repr=False, compare=False)
    """Which of the shortest valid candidates says by its length how many tokens the group needs."""

    def __post_init__(self) -> None:
        for name in ("size", "fewest", "completion_place"):
            object.__setattr__(self, name, self.num_shortest + self.num_longest)

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        """Say why a finished candidate was not selected."""
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        """Return 1 / (probability to be selected) of each selected candidate of a complete group, by index.

        The probability is over tail draws and pruning, given how long each of the ``candidates`` would have become;
        these are all that count, stopped ones too. ``None`` if some can never be selected, so that no weights make up
        for what is missing: unless a rule says otherwise, if not all were certain to be selected.
        """
        certain = all(c.selected_as is not None and c.survival == 1 for c in candidates)
        return {c.index: 1.0 for c in candidates} if certain else None


# --- no shaping -------------------------------------------------------------


class InOrderSelector(Selector):
    """The first candidates by index are in the group, however they finish."""

    def select(self) -> dict[int, SelectedAs]:
        finished = sorted(index for _, index in (*self.valid, *self.invalid))
        # A truncated one, too: it takes no other's place, as nothing is selected by how it finished.
        return dict.fromkeys(finished[: self.rule.size], SelectedAs.SHORT)

    def stops(self) -> dict[int, DiscardReason]:
        # A running candidate may still fail, and then a later one takes its place. So later ones are stopped only when
        # as many as are needed have finished before them.
        if not self.running or len(self.valid) + len(self.invalid) < self.rule.size:
            return {}
        last = max(self.select())
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in self.running if index > last}

    def deliveries(self) -> list[int]:
        first = self.candidates if len(self.candidates) <= self.rule.size else sorted(self.candidates)[: self.rule.size]
        return [index for index in first if not self.candidates[index].running]


class InOrder(SelectionRule):
    """Select the first candidates by index, however they finished: no shaping."""

    __slots__ = ()
    selector_type = InOrderSelector

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        # Chosen before anything ran, so they are a plain sample by themselves.
        return {c.index: 1.0 for c in candidates if c.selected_as is not None}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE


# --- the shortest, and the longest ------------------------------------------


class DualEndSelector(Selector):
    """The K shortest and the L longest valid candidates are in the group."""

    def __init__(self, rule: "SelectionRule", deliver_early: bool) -> None:
        super().__init__(rule, deliver_early)
        self._undelivered: list[Key] = []  # valid ones, shortest first

    def update(self, candidate: Candidate) -> None:
        super().update(candidate)
        if candidate.valid:
            insort(self._undelivered, (candidate.tokens, candidate.index))

    def select(self) -> dict[int, SelectedAs]:
        short, long = self.rule.num_shortest, max(self.rule.num_shortest, len(self.valid) - self.rule.num_longest)
        return {
            **{index: SelectedAs.SHORT for _, index in self.valid[:short]},
            **{index: SelectedAs.LONG for _, index in self.valid[long:] if self.rule.num_longest},
            **{index: SelectedAs.FILL for _, index in self.invalid[: max(0, self.rule.size - len(self.valid))]},
        }

    def stops(self) -> dict[int, DiscardReason]:
        if self.rule.num_longest:
            return {}
        beyond = self.running[self.num_below_threshold(self.rule.num_shortest) :]
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in beyond}

    def deliveries(self) -> list[int]:
        """Those that are certain are the first ones, and the last ones. Each is named once."""
        certain, keys = [], self._undelivered
        while keys and self._is_in_group(keys[0]):
            certain.append(keys.pop(0)[1])
        while keys and self._is_in_group(keys[-1]):
            certain.append(keys.pop()[1])
        return certain

    def check_at(self) -> dict[int, int]:
        places = self.rule.num_shortest
        if not self.deliver_early:
            return {} if self.rule.num_longest else self.threshold_checks(places)
        below = self.running[: self.num_below_threshold(places)]
        checks = ((key[1], self.next_check(key, places)) for key in below)
        return {index: tokens for index, tokens in checks if tokens is not None}

    def _is_in_group(self, key: Key) -> bool:
        """Whether no outcome of the running candidates leaves out this valid one.

        It is left out only with at least K valid ones before it and at least L after it. Any running candidate can end
        after it; only those shorter so far can end before it.
        """
        rank = bisect_left(self.valid, key)
        missing_before = max(0, self.rule.num_shortest - rank)
        missing_after = max(0, self.rule.num_longest - (len(self.valid) - rank - 1))
        can_precede = bisect_left(self.running, key)
        return missing_before > can_precede or missing_before + missing_after > len(self.running)


class DualEnd(SelectionRule):
    """Select the K shortest and the L longest valid candidates (DARTS, distribution-aware trajectory sampling).

    If fewer than K + L are valid, all of these are selected, and invalid ones fill up, shortest first.

    With L = 0 it is the rule for saturated prompts (DARTS, variance-guided tail pruning): a running candidate that is
    longer than the K-th shortest is stopped. With L >= 1 any of them may turn out the longest, so all run to their end.
    """

    __slots__ = ()
    selector_type = DualEndSelector

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        if candidate.valid and not self.num_longest:
            return DiscardReason.LONGER_THAN_NEEDED
        return super().discard_reason(candidate)


# --- survivors of pruning, whatever their lengths ---------------------------


class AllSurvivors(SelectionRule):
    """Select all candidates that were not pruned, for trainers that take groups of any size (ARRoL).

    One is always left, since nothing can be learned from an empty group; ``size`` is what the caller requested.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fewest", 1)

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        return {c.index: 1 / c.survival for c in candidates if c.selected_as is not None}


class SampledSurvivorsSelector(Selector):
    def select(self) -> dict[int, SelectedAs]:
        draws = sorted((self.candidates[index].tail_draw, index) for index in super().select())
        return dict.fromkeys((index for _, index in draws[: self.rule.size]), SelectedAs.SURVIVOR)


class SampledSurvivors(SelectionRule):
    """Select ``size`` of the candidates that were not pruned, all with the same probability: those of the lowest draws.

    All survivors run to their end. One that loses the draw must not be stopped before: whether one can be pruned
    depends on how many are left, so pruning would depend on tail draws, and the weights would not be exact.
    """

    __slots__ = ()
    selector_type = SampledSurvivorsSelector
    samples_survivors = True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        selected = [c for c in candidates if c.selected_as is not None]
        share = sum(c.reason is not DiscardReason.PRUNED for c in candidates) / len(selected)
        return {c.index: share / c.survival for c in selected}

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE
