"""Selection rules: which candidates of a prompt make the group, and what is certain while some of them still run.

A rule itself is a value. While a group runs, an `Assessment` that the rule creates follows it.

A rule reads only lengths, validity (finished at a stop token rather than at the length limit), indices, tail draws and
the deadline. It never reads a reward or a score, and does not depend on the order in which candidates finish.

All rules share one total order, (length, candidate index): the shortest come first, ties go to the earlier index. Rules
with a sampled tail are in `sampled_tail`.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from darts_server.policy.candidate import Candidate
from darts_server.types import DiscardReason, SelectedAs

Key = tuple[int, int]
"""`Candidate.sort_key`: (length, index), the order that all rules share."""
BEFORE_ALL: Key = (0, -1)
"""A key that comes before those of all candidates."""
ItemT = TypeVar("ItemT", Key, tuple[float, int], int)


# --- candidates in order ----------------------------------------------------


class Standings:
    """The ``running``, the ``valid`` and the ``invalid`` candidates of a group, each list shortest first.

    An update takes O(log n) comparisons. A plain list also moves all that comes after an insertion, eight bytes for
    each candidate: with ten thousand of them that takes a microsecond.
    """

    def __init__(self) -> None:
        self.running: list[Key] = []
        self.valid: list[Key] = []
        self.invalid: list[Key] = []
        self._entries: dict[int, tuple[list[Key], Key]] = {}

    def __len__(self) -> int:
        """Number of candidates that are in the group or may still be."""
        return len(self._entries)

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

    def add(self, candidate: Candidate) -> None:
        keys = self.running if candidate.running else self.valid if candidate.valid else self.invalid
        insort(keys, candidate.sort_key)
        self._entries[candidate.index] = keys, candidate.sort_key

    def remove(self, index: int) -> None:
        """Remove a candidate, by the key it was added with. Harmless if it is not here."""
        if index in self._entries:
            keys, key = self._entries.pop(index)
            del keys[bisect_left(keys, key)]


class ShortestPlaces:
    """The places of the K shortest valid candidates: who has one for certain, who cannot get one, who still can.

    The threshold is the K-th shortest valid candidate so far. It can only come down, and a running candidate only gets
    longer: whoever has passed it has passed it for good. So candidates can be stopped before all have finished.

    Every method takes O(log n), and those that return candidates as much again for each of them.
    """

    def __init__(self, places: int, standings: Standings) -> None:
        self.places = places
        self._standings = standings

    @property
    def is_full(self) -> bool:
        """Whether K valid candidates have finished."""
        return len(self._standings.valid) >= self.places

    @property
    def last(self) -> Key | None:
        """Key of the K-th shortest valid candidate so far, the threshold; ``None`` while fewer have finished."""
        if not self.is_full:
            return None
        return self._standings.valid[self.places - 1] if self.places else BEFORE_ALL

    @property
    def num_contenders(self) -> int:
        """Number of running candidates that can still get a place: they come first among the running ones."""
        running = self._standings.running
        return len(running) if self.last is None else bisect_left(running, self.last)

    @property
    def contenders(self) -> Sequence[Key]:
        return self._standings.running[: self.num_contenders]

    def is_certain(self, place: int) -> bool:
        """Whether the valid candidate at this ``place`` (from 0) keeps one, whatever the running ones do.

        If it does, so do all shorter ones.
        """
        return place + bisect_left(self._standings.running, self._standings.valid[place]) < self.places

    def check_at(self, contender: Key, at_every_place: bool) -> int | None:
        """Return the token count at which a contender falls behind the next finished candidate; ``None`` without one.

        Only the threshold counts or, ``at_every_place``, each finished candidate that has one of the K places. Of two
        equal lengths the earlier index is first, so a contender with a later index falls behind one token earlier.
        """
        valid = self._standings.valid
        place = bisect_left(valid, contender) if at_every_place else self.places - 1
        if place >= min(self.places, len(valid)):
            return None
        tokens, index = valid[place]
        return tokens if contender[1] < index else tokens - 1

    def checks(self, at_every_place: bool) -> dict[int, int]:
        """Return `check_at` of each contender that has one, by index."""
        counts = ((contender[1], self.check_at(contender, at_every_place)) for contender in self.contenders)
        return {index: tokens for index, tokens in counts if tokens is not None}


def split_by_validity(finished: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the valid and the invalid candidates, each shortest first."""
    ordered = sorted(finished, key=lambda c: c.sort_key)
    return [c for c in ordered if c.valid], [c for c in ordered if not c.valid]


def remove_sorted(items: list[ItemT], item: ItemT) -> None:
    """Remove ``item`` from a sorted list, if it is there."""
    place = bisect_left(items, item)
    if items[place : place + 1] == [item]:
        del items[place]


# --- what every rule has ----------------------------------------------------


class Assessment:
    """What is certain, whatever the running candidates do, as long as they do not fail.

    It is updated with each candidate that changes, so that an event costs O(log n) rather than a look at the whole
    group. All methods but `update` are queries: they change nothing, except that `newly_settled` remembers its answers.

    A group is complete when nothing runs that is not hopeless. This base class holds nothing for certain, so its group
    waits for all candidates.
    """

    has_deadline: ClassVar[bool] = False
    """Whether the group has a deadline, and a bound. Otherwise both are ignored."""

    def __init__(self) -> None:
        self.standings = Standings()
        self.deadline: int | None = None
        """The cohort's deadline in tokens; ``None`` while there is none."""
        self.bound: int | None = None
        """Length at which every candidate is cut; ``None`` while there is none."""

    def update(self, candidate: Candidate) -> None:
        """Take over the present state of a candidate: new, longer, finished, cut or discarded."""
        self.remove(candidate.index)
        if candidate.alive:
            self.add(candidate)

    def add(self, candidate: Candidate) -> None:
        self.standings.add(candidate)

    def remove(self, index: int) -> None:
        """Remove a candidate that was discarded, or that is added again. Harmless if it is not here."""
        self.standings.remove(index)

    def hopeless(self) -> dict[int, DiscardReason]:
        """Running candidates that cannot be in the group any more, and why."""
        return {}

    def cuts(self) -> dict[int, int]:
        """Candidates, running or finished, of which only the first tokens are in the group, and how many."""
        return {}

    def newly_settled(self) -> list[int]:
        """Finished candidates that are certain to be in the group, and were not returned by an earlier call."""
        return []

    def at_bound(self) -> list[int]:
        """Running candidates that have reached the bound."""
        if self.bound is None or not self.has_deadline:
            return []
        running = self.standings.running  # by keys, which are one token more than each has
        return [index for _, index in running[bisect_left(running, (self.bound + 1, -1)) :]]

    def check_at(self) -> dict[int, int]:
        """Running candidate -> token count at which anything above may change; progress before that changes nothing.

        Candidates that are hopeless must have been removed.
        """
        return {}


@dataclass(frozen=True, slots=True)
class SelectionRule(ABC):
    """How the group is selected: ``num_shortest`` (K) places for the shortest, and ``num_longest`` (L) for the tail.

    The defaults are what holds for most rules.
    """

    num_shortest: int
    num_longest: int = 0

    @property
    def size(self) -> int:
        """M: how many trajectories are returned."""
        return self.num_shortest + self.num_longest

    @property
    def fewest(self) -> int:
        """How many candidates must be left of those that are pruned or fail."""
        return self.size

    @property
    def completion_place(self) -> int:
        """Which of the shortest valid candidates says by its length how many tokens the group needs."""
        return self.size

    @property
    def samples_rest(self) -> bool:
        """Whether the K shortest are selected, and a sample of all others."""
        return False

    @abstractmethod
    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        """Select from candidates that have all finished; fewer than ``size`` only if there are fewer.

        ``deadline``: the cohort's, in tokens; ``None`` while there is none.
        """

    @abstractmethod
    def begin(self, deliver_early: bool) -> Assessment:
        """Create what follows a group while it runs.

        ``deliver_early``: whether settled candidates are read before the group is complete.
        """

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        """Say why a finished candidate was not selected."""
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED

    def sampled_from(self, candidates: Sequence[Candidate]) -> int | None:
        """Return of how many candidates a complete group is a plain sample; ``None`` if it is selected otherwise.

        ``candidates``: all that count, as for `weights`.
        """
        return None

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        """Return 1 / (probability to be selected) of each selected candidate of a complete group, by index.

        The probability is over tail draws and pruning, given how long each of the ``candidates`` would have become;
        these are all that count, stopped ones too. ``None`` if some can never be selected, so that no weights make up
        for what is missing: unless a rule says otherwise, if not all were certain to be selected.
        """
        certain = all(c.selected_as is not None and c.survival == 1 for c in candidates)
        return {c.index: 1.0 for c in candidates} if certain else None


# --- no shaping -------------------------------------------------------------


class InOrder(SelectionRule):
    """Select the first candidates by index, however they finished: no shaping."""

    __slots__ = ()

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        chosen = sorted(finished, key=lambda c: c.index)[: self.size]
        return {c.index: SelectedAs.SHORT if c.valid else SelectedAs.FILL for c in chosen}

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        # Chosen before anything ran, so they are a plain sample by themselves.
        return {c.index: 1.0 for c in candidates if c.selected_as is not None}

    def begin(self, deliver_early: bool) -> Assessment:
        return InOrderAssessment(self.size)

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE


class InOrderAssessment(Assessment):
    """The first ``size`` candidates by index are in the group, however they finish."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._alive: list[int] = []
        self._running: list[int] = []
        self._finished: list[int] = []
        self._pending: list[int] = []  # finished, and not settled yet

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        insort(self._alive, candidate.index)
        if candidate.running:
            insort(self._running, candidate.index)
        else:
            insort(self._finished, candidate.index)
            insort(self._pending, candidate.index)

    def remove(self, index: int) -> None:
        super().remove(index)
        remove_sorted(self._alive, index)
        remove_sorted(self._running, index)

    def hopeless(self) -> dict[int, DiscardReason]:
        # A running candidate may still fail, and then a later one takes its place. So later ones are stopped only when
        # as many as are needed have finished before them.
        if len(self._finished) < self._size:
            return {}
        last = self._finished[self._size - 1]
        return dict.fromkeys(self._running[bisect_right(self._running, last) :], DiscardReason.LONGER_THAN_NEEDED)

    def newly_settled(self) -> list[int]:
        within = len(self._pending)
        if len(self._alive) > self._size:
            within = bisect_right(self._pending, self._alive[self._size - 1])
        settled, self._pending = self._pending[:within], self._pending[within:]
        return settled


# --- the shortest, and the longest ------------------------------------------


class Shortest(SelectionRule):
    """Select the shortest valid candidates, and fill up with the shortest invalid ones.

    DARTS, variance-guided tail pruning: the rule for saturated prompts.
    """

    __slots__ = ()

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        return {
            **{c.index: SelectedAs.SHORT for c in valid[: self.size]},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def begin(self, deliver_early: bool) -> Assessment:
        return ShortestAssessment(self.size, deliver_early)

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.LONGER_THAN_NEEDED if candidate.valid else DiscardReason.TRUNCATED


class ShortestAssessment(Assessment):
    """The K shortest valid candidates are in the group; whoever has passed the K-th of them is not.

    ``deliver_early``: whether `newly_settled` is called, which takes more checks.
    """

    def __init__(self, places: int, deliver_early: bool) -> None:
        super().__init__()
        self.places = ShortestPlaces(places, self.standings)
        self.deliver_early = deliver_early
        self.pending: list[Key] = []
        """Valid candidates that are not settled yet, shortest first."""

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        if candidate.valid:  # which it stays: only a rule that cuts changes that
            insort(self.pending, candidate.sort_key)

    def hopeless(self) -> dict[int, DiscardReason]:
        passed = self.standings.running[self.places.num_contenders :]
        return {index: DiscardReason.LONGER_THAN_NEEDED for _, index in passed}

    def newly_settled(self) -> list[int]:
        settled = []
        while self.pending and self.places.is_certain(bisect_left(self.standings.valid, self.pending[0])):
            settled.append(self.pending.pop(0)[1])
        return settled

    def check_at(self) -> dict[int, int]:
        return self.places.checks(at_every_place=self.deliver_early)


class LongestTail(SelectionRule):
    """Select the K shortest and the L longest valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may turn out the longest, so with L >= 1 all of them run to their end. If fewer than K + L are
    valid, all of these are selected, and invalid ones fill up, shortest first.
    """

    __slots__ = ()

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        short = valid[: self.num_shortest]
        long = valid[self.num_shortest :][-self.num_longest :] if self.num_longest else []
        return {
            **{c.index: SelectedAs.SHORT for c in short},
            **{c.index: SelectedAs.LONG for c in long},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def begin(self, deliver_early: bool) -> Assessment:
        if not self.num_longest:
            return ShortestAssessment(self.size, deliver_early)
        return LongestTailAssessment(self.num_shortest, self.num_longest, deliver_early)


class LongestTailAssessment(ShortestAssessment):
    """The K shortest and the L >= 1 longest valid candidates are in the group: any running one may be the longest."""

    def __init__(self, num_shortest: int, num_longest: int, deliver_early: bool) -> None:
        super().__init__(num_shortest, deliver_early)
        self._num_longest = num_longest

    def hopeless(self) -> dict[int, DiscardReason]:
        return {}

    def newly_settled(self) -> list[int]:
        settled = []
        while self.pending and self._is_settled(self.pending[0]):
            settled.append(self.pending.pop(0)[1])
        while self.pending and self._is_settled(self.pending[-1]):
            settled.append(self.pending.pop()[1])
        return settled

    def check_at(self) -> dict[int, int]:
        return super().check_at() if self.deliver_early else {}

    def _is_settled(self, key: Key) -> bool:
        """Whether no outcome of the running candidates leaves out this valid one.

        It is left out only with at least K valid ones before it and at least L after it. Any running candidate can end
        after it; only those shorter so far can end before it. So those that are settled are the first ones, and the
        last ones.
        """
        running, valid = self.standings.running, self.standings.valid
        rank = bisect_left(valid, key)
        missing_before = max(0, self.places.places - rank)
        missing_after = max(0, self._num_longest - (len(valid) - rank - 1))
        can_precede = bisect_left(running, key)
        return missing_before > can_precede or missing_before + missing_after > len(running)


# --- survivors of pruning, whatever their lengths ---------------------------


class AllSurvivors(SelectionRule):
    """Select all candidates that were not pruned, for trainers that take groups of any size (ARRoL).

    One is always left, since nothing can be learned from an empty group; ``size`` is what the caller requested.
    """

    __slots__ = ()

    @property
    def fewest(self) -> int:
        return 1

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return {c.index: SelectedAs.SURVIVOR for c in finished}

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        return {c.index: 1 / c.survival for c in candidates if c.selected_as is not None}

    def begin(self, deliver_early: bool) -> Assessment:
        return Assessment()  # nothing is settled while any candidate runs: the number of survivors is open until then


class SampledSurvivors(SelectionRule):
    """Select ``size`` of the candidates that were not pruned, all with the same probability: those of the lowest draws.

    All survivors run to their end. Whoever loses the draw must not be stopped before: whether one can be spared depends
    on how many are left, so pruning would depend on tail draws, and the weights would not be exact.
    """

    __slots__ = ()

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        chosen = sorted(finished, key=lambda c: (c.tail_draw, c.index))[: self.size]
        return {c.index: SelectedAs.SURVIVOR for c in sorted(chosen, key=lambda c: c.index)}

    def sampled_from(self, candidates: Sequence[Candidate]) -> int:
        return sum(c.reason is not DiscardReason.PRUNED for c in candidates)

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        selected = [c for c in candidates if c.selected_as is not None]
        share = self.sampled_from(candidates) / len(selected)
        return {c.index: share / c.survival for c in selected}

    def begin(self, deliver_early: bool) -> Assessment:
        return Assessment()

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE
