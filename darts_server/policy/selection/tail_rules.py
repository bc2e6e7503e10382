"""Selection rules that give some places to longer candidates: two kinds of tail, the sampled one also with a deadline.

The deadline D of a group is that of its cohort, but at least the length of its own M-th shortest valid candidate: a
prompt that needs long answers has the time for them. While the cohort has no deadline the group has none. A bound may
be set with the deadline: then every candidate is cut there, as if it were the length limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.assessment import Assessment, ShortestAssessment
from darts_server.policy.selection.longest_tail import LongestTailAssessment
from darts_server.policy.selection.rules import RuleDefaults
from darts_server.policy.selection.sampled_tail import CutTailAssessment, SampledTailAssessment
from darts_server.policy.selection.shortest_places import split_by_validity
from darts_server.types import SelectedAs


@dataclass(frozen=True, slots=True)
class _TailRule(RuleDefaults):
    """``num_shortest`` (K) places for the shortest and ``num_longest`` (L) for the tail."""

    num_shortest: int
    num_longest: int

    @property
    def size(self) -> int:
        return self.num_shortest + self.num_longest


@dataclass(frozen=True, slots=True)
class LongestTail(_TailRule):
    """Select the K shortest and the L longest valid candidates (DARTS, distribution-aware trajectory sampling).

    Any running candidate may turn out the longest, so with L >= 1 all of them run to their end. If fewer than K + L are
    valid, all of these are selected, and invalid ones fill up, shortest first.
    """

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


@dataclass(frozen=True, slots=True)
class SampledTail(_TailRule):
    """Select the K shortest valid candidates and L sampled from all others, whatever their length or validity.

    The random numbers are drawn before anything runs: once the K shortest are certain, so is who wins among the rest,
    and the others can be stopped. Drawn later, they would favour candidates that finish early. It also makes the group
    a function of lengths and seed alone.

    A sampled candidate stays in the group however it ends. Replacing one that hits the length limit would hide from the
    trainer that running on earns nothing. If fewer than K are valid, their places are sampled from the rest too. So
    each of the rest has the same probability to be returned, in every case.
    """

    def select(self, finished: Sequence[Candidate], deadline: int | None = None) -> dict[int, SelectedAs]:
        valid, invalid = split_by_validity(finished)
        short = valid[: self.num_shortest]
        truncated = SelectedAs.FILL if len(short) < self.num_shortest else SelectedAs.LONG_TRUNCATED
        rest = sorted((*valid[self.num_shortest :], *invalid), key=lambda c: c.tail_draw)
        return {
            **{c.index: SelectedAs.SHORT for c in short},
            **{c.index: SelectedAs.LONG if c.valid or c.cut else truncated for c in rest[: self.size - len(short)]},
        }

    @property
    def samples_rest(self) -> bool:
        return True

    def weights(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        """See `SelectionRule.weights`.

        ``None`` if candidates were pruned at random: whether one could be spared depends on who was stopped, and so on
        tail draws.
        """
        if any(c.survival < 1 for c in candidates):
            return None
        selected = [c for c in candidates if c.selected_as is not None]
        short = sum(c.selected_as is SelectedAs.SHORT for c in selected)
        sampled, rest = len(selected) - short, len(candidates) - short
        if rest and not sampled:  # the tail has no places
            return None
        return {c.index: 1.0 if c.selected_as is SelectedAs.SHORT else rest / sampled for c in selected}

    def begin(self, deliver_early: bool) -> Assessment:
        return SampledTailAssessment(self.num_shortest, self.num_longest, deliver_early)


@dataclass(frozen=True, slots=True)
class CutTail(SampledTail):
    """Select the K shortest and L sampled from the rest, of these only the first D tokens. An extension of ours.

    It hides nothing from the trainer: a trajectory that ran on beyond the deadline is returned as a truncated one.
    Candidates that lost the tail run until they pass the M-th shortest rather than the K-th, since the deadline is at
    least the M-th shortest length, which must be known.

    ``last_needed``: whose length the deadline is at least, if not the M-th shortest's.
    """

    last_needed: int | None = None

    @property
    def completion_place(self) -> int:
        return self.size if self.last_needed is None else self.last_needed

    def begin(self, deliver_early: bool) -> Assessment:
        return CutTailAssessment(self.num_shortest, self.num_longest, deliver_early, self.completion_place)
