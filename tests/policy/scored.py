"""Worlds whose candidates are scored on their way, so that some of them are pruned."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import strategies as st

from darts_server.policy.events import Decision, Event, Finished, Keep, Scored, Start, Started, Stop
from darts_server.policy.group import Group
from darts_server.policy.selection import AllSurvivors, SampledSurvivors
from darts_server.types import DiscardReason
from tests.policy.cases import Case
from tests.policy.world import Run, World

QUALITIES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
SURVIVALS = st.sampled_from([0.0, 0.3, 0.7, 1.0])
SURVIVORS = st.builds(AllSurvivors, st.integers(1, 4))
SAMPLED_SURVIVORS = st.builds(SampledSurvivors, st.integers(1, 4))


@dataclass(frozen=True, slots=True)
class Score:
    """What is said of a candidate when it has generated ``tokens``."""

    tokens: int
    quality: float
    survival: float


@dataclass(slots=True)
class ScoredWorld(World):
    """``scores``: of each candidate, by index."""

    scores: Sequence[Sequence[Score]] = ()
    kept: dict[int, float] = field(default_factory=dict)
    """Candidate -> product of the probabilities that it was kept with."""
    qualities: dict[int, float] = field(default_factory=dict)

    @property
    def pruned(self) -> set[int]:
        return {i for i, stop in self.stopped.items() if stop.reason is DiscardReason.PRUNED}

    def _record(self, event: Event) -> None:
        World._record(self, event)
        if not isinstance(event, Scored) or self.group.outcome is not None:
            return
        if event.index in self.known or event.index in self.finished:
            self.qualities[event.index] = event.quality

    def _advance(self, i: int, run: Run) -> list[Event]:
        before = run.tokens
        events = World._advance(self, i, run)
        if i not in self.known or not run.started:
            return events
        due = [score for score in self.scores[i] if before < score.tokens <= run.tokens]
        scored: list[Event] = [Scored(i, score.quality, score.survival) for score in due]
        place = 1 if events and isinstance(events[0], Started) else 0
        late = any(isinstance(event, Finished) for event in events) and self.order.random() < 0.5
        return [*events, *scored] if late else [*events[:place], *scored, *events[place:]]

    def act(self, decisions: Sequence[Decision]) -> None:
        before = set(self.stopped)
        returnable = len(self.known) + sum(fate.valid for fate in self.finished.values())
        for decision in decisions:
            match decision:
                case Start(indices):
                    returnable += len(indices)
                case Keep(i, survival):
                    assert i in self.known
                    self.kept[i] = self.kept.get(i, 1.0) * survival
                case Stop(i, DiscardReason.PRUNED):
                    before.add(i)
                    returnable -= 1
                    self.gone = frozenset(self.failed) | before
                    assert returnable >= self.rule.fewest, "pruned below what the group needs"
        World.act(self, decisions)


@dataclass(frozen=True)
class ScoredCase:
    case: Case
    scores: Sequence[Sequence[Score]]
    most: int = 0
    chances: int | None = 0
    """Seed for pruning; ``None`` for a group that prunes nothing."""

    def world(self) -> ScoredWorld:
        case = self.case
        chances = None if self.chances is None else np.random.default_rng(self.chances)
        return ScoredWorld(
            group=Group(
                rng=np.random.default_rng(case.seed),
                max_replacements=case.replacements,
                deliver_early=case.early,
                survival_rng=chances,
            ),
            rule=case.rule,
            candidates=case.candidates,
            truths=case.truths,
            order=Random(case.order),
            peek=case.peek,
            at_once=case.at_once,
            limits=case.limits,
            additions=case.additions,
            opening=case.opening,
            scores=self.scores,
            most=self.most,
        )


@st.composite
def scored(draw: st.DrawFn, of: st.SearchStrategy[Case], refill: bool = False) -> ScoredCase:
    case = draw(of)
    score = st.builds(Score, st.integers(1, 6), QUALITIES, SURVIVALS)
    count = len(case.truths)
    scores = draw(st.lists(st.lists(score, max_size=2), min_size=count, max_size=count))
    most = draw(st.integers(0, count - case.replacements)) if refill else 0
    return ScoredCase(case, scores, most, draw(st.integers(0, 1000)))
