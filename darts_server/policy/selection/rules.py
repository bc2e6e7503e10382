"""Selection rules: which candidates of a prompt make the group, and what is certain while some of them still run.

A rule itself is a value. While a group runs, an `Assessment` that the rule creates follows it.

A rule reads only lengths, validity (finished at a stop token rather than at the length limit), indices, tail draws and
the deadline. It never reads a reward or a score, and does not depend on the order in which candidates finish.

All rules share one total order, (length, candidate index): the shortest come first, ties go to the earlier index. Rules
with a tail are in `tail_rules`, those for policies that prune in `survivors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment, ShortestAssessment
from darts_server.policy.selection.index_order import InOrderAssessment
from darts_server.policy.selection.shortest_places import split_by_validity
from darts_server.types import DiscardReason, SelectedAs


class SelectionRule(Protocol):
    """How the group is selected. ``deadline``: the cohort's, in tokens; ``None`` while there is none."""

    @property
    def size(self) -> int:
        """M: how many trajectories are returned."""
        ...

    @property
    def fewest(self) -> int:
        """How many candidates must be left of those that are pruned or fail."""
        ...

    @property
    def num_shortest(self) -> int:
        """K: once that many have finished, the group waits for its tail only."""
        ...

    @property
    def completion_place(self) -> int:
        """Which of the shortest valid candidates says by its length how many tokens the group needs."""
        ...

    @property
    def samples_rest(self) -> bool:
        """Whether the K shortest are selected, and a sample of all others."""
        ...

    def sampled_from(self, candidates: Sequence[Candidate]) -> int | None:
        """Return of how many candidates a complete group is a plain sample; ``None`` if it is selected otherwise.

        ``candidates``: all that count, as for `weights`.
        """
        ...

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        """Select from candidates that have all finished; fewer than ``size`` only if there are fewer."""
        ...

    def begin(self, deliver_early: bool) -> Assessment:
        """Create what follows a group while it runs.

        ``deliver_early``: whether settled candidates are read before the group is complete.
        """
        ...

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        """Say why a finished candidate was not selected."""
        ...

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        """Return 1 / (probability to be selected) of each selected candidate of a complete group, by index.

        The probability is over tail draws and pruning, given how long each of the ``candidates`` would have become;
        these are all that count, stopped ones too. ``None`` if some can never be selected, so that no weights make up
        for what is missing.
        """
        ...


class RuleDefaults:
    """What holds for most rules. There are weights only for groups of all candidates."""

    __slots__ = ()

    @property
    def fewest(self: SelectionRule) -> int:
        return self.size

    @property
    def completion_place(self: SelectionRule) -> int:
        return self.size

    @property
    def samples_rest(self) -> bool:
        return False

    def sampled_from(self, candidates: Sequence[Candidate]) -> int | None:
        return None

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        """Return 1 for each if all were certain to be selected, and otherwise ``None``."""
        certain = all(c.selected_as is not None and c.survival == 1 for c in candidates)
        return {c.index: 1.0 for c in candidates} if certain else None

    def discard_reason(self, candidate: Candidate) -> DiscardReason:
        return DiscardReason.MIDDLE if candidate.valid else DiscardReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class SizedRule(RuleDefaults):
    """A rule without a tail: ``size`` (M) is all that it needs to know of the group."""

    size: int

    @property
    def num_shortest(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class InOrder(SizedRule):
    """Select the first ``size`` candidates by index, however they finished: no shaping."""

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


@dataclass(frozen=True, slots=True)
class Shortest(SizedRule):
    """Select the ``size`` shortest valid candidates, and fill up with the shortest invalid ones.

    DARTS, variance-guided tail pruning: the rule for saturated prompts.
    """

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
