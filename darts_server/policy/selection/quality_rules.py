"""Selection rules that ignore length: a target share of correct trajectories, and survivors of pruning."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment
from darts_server.policy.selection.nearest_mean import select_nearest_mean
from darts_server.policy.selection.rules import SizedRule
from darts_server.policy.selection.shortest_places import split_by_validity
from darts_server.types import DiscardReason, SelectedAs

DEFAULT_QUALITY = 0.5
"""Of all candidates where none was scored. They are equal then, so any number would do."""


@dataclass(frozen=True, slots=True)
class Balanced(SizedRule):
    """Select the ``size`` valid candidates whose expected share of correct ones is nearest ``target`` (rho).

    All candidates that are not pruned run to their end, since any of them may be selected. One that finished before it
    could be scored counts as the mean of the others. Of equally good choices the earliest indices are taken. If fewer
    than ``size`` are valid, all valid ones are selected, and invalid ones fill up, shortest first.
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

    def begin(self, deliver_early: bool) -> Assessment:
        return BalancedAssessment(self.size)


@dataclass(frozen=True, slots=True)
class AllSurvivors(SizedRule):
    """Select all candidates that were not pruned, for trainers that take groups of any size (ARRoL).

    One is always left, since nothing can be learned from an empty group; ``size`` is what the caller requested.
    """

    @property
    def fewest(self) -> int:
        return 1

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return {c.index: SelectedAs.SURVIVOR for c in finished}

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        return {c.index: 1 / c.survival for c in candidates if c.selected_as is not None}

    def begin(self, deliver_early: bool) -> Assessment:
        return Assessment()  # nothing is settled while any candidate runs: the number of survivors is open until then


@dataclass(frozen=True, slots=True)
class SampledSurvivors(SizedRule):
    """Select ``size`` of the candidates that were not pruned, all with the same probability: those of the lowest draws.

    All survivors run to their end. Whoever loses the draw must not be stopped before: whether one can be spared depends
    on how many are left, so pruning would depend on tail draws, and the weights would not be exact.
    """

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


class BalancedAssessment(Assessment):
    """Nothing is left out while there are no more candidates than places.

    Neither of all candidates nor, since invalid ones only fill up, of those that are or may become valid.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._valid: list[int] = []  # not settled yet, as those below
        self._invalid: list[int] = []

    def add(self, candidate: Candidate) -> None:
        super().add(candidate)
        if not candidate.running:
            (self._valid if candidate.valid else self._invalid).append(candidate.index)

    def newly_settled(self) -> list[int]:
        settled: list[int] = []
        if len(self.standings.running) + len(self.standings.valid) <= self._size:
            settled, self._valid = self._valid, []
        if len(self.standings) <= self._size:
            settled, self._invalid = settled + self._invalid, []
        return settled


def _qualities(candidates: Sequence[Candidate]) -> list[float]:
    """Return the candidates' qualities, with the mean of the scored ones for the others."""
    scored = [c.quality for c in candidates if c.quality is not None]
    mean = sum(scored) / len(scored) if scored else DEFAULT_QUALITY
    return [mean if c.quality is None else c.quality for c in candidates]
