"""Selection rules of policies that prune: which survivors are returned, whatever their lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment
from darts_server.policy.selection.rules import SizedRule
from darts_server.types import DiscardReason, SelectedAs


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
