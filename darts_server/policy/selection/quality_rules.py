"""Selection rules that ignore length: a target share of correct trajectories, and all survivors of pruning (ARRoL)."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.nearest_mean import select_nearest_mean
from darts_server.policy.selection.rules import Verdict
from darts_server.policy.selection.shortest_places import split_by_validity
from darts_server.types import DiscardReason, SelectedAs

DEFAULT_QUALITY = 0.5
"""Of all candidates where none was scored. They are equal then, so any number would do."""


@dataclass(frozen=True, slots=True)
class _QualityRule:
    """``size``: M, the trajectories to return."""

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class Balanced(_QualityRule):
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

    def assess(
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        if not running:
            return Verdict(frozenset(self.select(finished)))
        # Nothing can be left out while there are no more candidates than places: neither of all candidates nor, since
        # invalid ones only fill up, of those that are or may become valid.
        needed = finished if len(running) + len(finished) <= self.size else [c for c in finished if c.valid]
        all_needed = len(running) + len(needed) <= self.size
        return Verdict(frozenset(c.index for c in needed) if all_needed else frozenset())


@dataclass(frozen=True, slots=True)
class AllSurvivors(_QualityRule):
    """Select all candidates that were not pruned, at least ``size``, for trainers that take groups of any size."""

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        return {c.index: SelectedAs.BALANCED if c.valid else SelectedAs.FILL for c in finished}

    def assess(
        self,
        running: Sequence[Candidate],
        finished: Sequence[Candidate],
        deliver_early: bool,
        deadline: int | None = None,
    ) -> Verdict:
        # Nothing is settled while any candidate runs: until then the number of survivors is open.
        return Verdict(frozenset() if running else frozenset(c.index for c in finished))


def _qualities(candidates: Sequence[Candidate]) -> list[float]:
    """Return the candidates' qualities, with the mean of the scored ones for the others."""
    scored = [c.quality for c in candidates if c.quality is not None]
    mean = sum(scored) / len(scored) if scored else DEFAULT_QUALITY
    return [mean if c.quality is None else c.quality for c in candidates]
