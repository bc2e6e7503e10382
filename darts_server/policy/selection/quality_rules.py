"""Selection rules that do not go by length: the M with the wanted share of right ones, and all survivors (ARRoL)."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.nearest_mean import select_nearest_mean
from darts_server.policy.selection.rules import Verdict
from darts_server.policy.selection.shortest_places import split_by_validity
from darts_server.types import DiscardReason, SelectedAs

UNKNOWN = 0.5
"""Quality of candidates of a group in which none was scored: they are alike, so any number would do."""


@dataclass(frozen=True, slots=True)
class _Places:
    """M, as it was asked for."""

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class Balanced(_Places):
    """The ``size`` valid candidates whose expected share of right ones is nearest ``target`` (rho).

    All that are not pruned run to their end, since any of them may be wanted. One that was never scored, because it
    ended before, counts as the mean of those that were. Of equally good choices it is the one with the earliest
    candidates. If valid ones are fewer than ``size``, all of them are taken and invalid ones fill up, shortest first.
    """

    target: float

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        valid.sort(key=lambda c: c.index)
        chosen = select_nearest_mean(_qualities(valid), self.size, self.target)
        return {
            **{valid[i].index: SelectedAs.BALANCED for i in chosen},
            **{c.index: SelectedAs.FILL for c in invalid[: max(0, self.size - len(valid))]},
        }

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        if not running:
            return Verdict(frozenset(self.select(finished)))
        # While there are no more of them than seats, nobody of them can be left out; neither can valid ones alone.
        needed = finished if len(running) + len(finished) <= self.size else [c for c in finished if c.valid]
        room = len(running) + len(needed) <= self.size
        return Verdict(frozenset(c.index for c in needed) if room else frozenset())


@dataclass(frozen=True, slots=True)
class AllSurvivors(_Places):
    """All that were not pruned, ``size`` at least, however they ended: for trainers that take groups of any size."""

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return {c.index: SelectedAs.BALANCED if c.valid else SelectedAs.FILL for c in finished}

    def assess(
        self, running: Sequence[Candidate], finished: Sequence[Candidate], early: bool, deadline: int | None = None
    ) -> Verdict:
        # Nothing is settled before the end: how many are returned is not known.
        return Verdict(frozenset() if running else frozenset(c.index for c in finished))


def _qualities(candidates: Sequence[Candidate]) -> list[float]:
    known = [c.quality for c in candidates if c.quality is not None]
    mean = sum(known) / len(known) if known else UNKNOWN
    return [mean if c.quality is None else c.quality for c in candidates]
