"""Replay a selection rule on candidates whose lengths are known, as if they had run side by side.

Shadow policies and pictures use it: the answer is exact, since the same state machine decides as on a real engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.events import Cut, DeadlineSet, Event, Finished, Progress, Started, Stop
from darts_server.policy.group import Group
from darts_server.policy.selection.rules import SelectionRule
from darts_server.types import FinishReason


@dataclass(frozen=True, slots=True)
class Replay:
    """Outcome of a replay.

    ``lengths``: tokens of each candidate when it finished or was stopped or cut. ``selection``: indices of the returned
    ones. ``steps``: decode steps until the group was complete.
    """

    lengths: tuple[int, ...]
    selection: tuple[int, ...]
    steps: int

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(self.lengths)

    @property
    def returned(self) -> int:
        """Tokens of the returned trajectories."""
        return sum(self.lengths[i] for i in self.selection)


def replay(rule: SelectionRule, candidates: Sequence[Candidate], deadline: int | None = None) -> Replay:
    """Run finished ``candidates``, at least ``rule.size``, again: all start together and get one token a step.

    Their tail draws are reused. ``deadline``: the cohort's deadline in tokens, known from the start.
    """
    group = Group(rng=_Recorded(c.tail_draw for c in candidates), max_replacements=0)
    group.open(rule, len(candidates))
    step, lengths = 0, [c.tokens for c in candidates]
    known = [] if deadline is None else [DeadlineSet(deadline)]
    group.handle(*known, *(Started(i) for i in range(len(candidates))))
    while group.outcome is None:
        running = [c.index for c in group.candidates if c.running]
        # Go on to the next step at which anything can happen. A check may be due at a count that was passed already: it
        # is made in the same step.
        step = max(step, min([*(lengths[i] for i in running), *group.check_at.values()]))
        for decision in group.handle(*_events(running, candidates, group.check_at, step)):
            match decision:
                case Stop(index=index):
                    lengths[index] = min(step, lengths[index])
                case Cut(index=index, tokens=tokens):
                    lengths[index] = tokens
    return Replay(tuple(lengths), tuple(c.index for c in group.candidates if c.selected_as is not None), step)


def _events(
    running: Iterable[int], candidates: Sequence[Candidate], check_at: Mapping[int, int], step: int
) -> list[Event]:
    """Return what the engine would report after ``step`` steps."""
    events: list[Event] = []
    for i in running:
        if candidates[i].tokens <= step:
            events.append(Finished(i, candidates[i].tokens, candidates[i].finish_reason or FinishReason.STOP))
        elif check_at.get(i, step + 1) <= step:
            events.append(Progress(i, step))
    return events


class _Recorded:
    """A generator of random numbers that were drawn before."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)
