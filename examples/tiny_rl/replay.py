"""Replay a selection rule on candidates whose lengths are known, as if they had run side by side.

The answer is exact, since the same state machine decides as on a real engine.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from darts_server.group.candidate import Candidate
from darts_server.group.events import Cut, DeadlineSet, Event, Finished, Progress, Started, Stop
from darts_server.group.group import Group
from darts_server.group.selection import SelectionRule
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


class _Draws:
    """A generator of random numbers that were drawn before."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)


def replay(
    rule: SelectionRule, candidates: Sequence[Candidate], deadline: int | None = None, bound: int | None = None
) -> Replay:
    """Run finished ``candidates``, at least ``rule.size``, again: all start together and get one token a step.

    Their tail draws are reused. ``deadline``: the cohort's deadline in tokens, known from the start. ``bound``: the
    length at which every candidate is cut.
    """
    group = Group(rng=_Draws(c.tail_draw for c in candidates), max_replacements=0)
    group.open(rule, len(candidates))
    step, lengths = 0, [c.tokens for c in candidates]
    by_length = deque(sorted(range(len(candidates)), key=lambda i: lengths[i]))
    known = [] if deadline is None else [DeadlineSet(deadline, bound)]
    group.handle(*known, *(Started(i) for i in range(len(candidates))))
    while group.outcome is None:
        while not group.candidates[by_length[0]].running:
            by_length.popleft()
        # Go on to the next step at which anything can happen. A check may be due at a count that was passed already: it
        # is made in the same step.
        step = max(step, min([candidates[by_length[0]].tokens, *group.check_at.values()]))
        events: dict[int, Event] = {i: Progress(i, step) for i, tokens in group.check_at.items() if tokens <= step}
        while by_length and (ended := candidates[by_length[0]]).tokens <= step:
            i = by_length.popleft()
            if group.candidates[i].running:
                events[i] = Finished(i, ended.tokens, ended.finish_reason or FinishReason.STOP)
        for decision in group.handle(*(events[i] for i in sorted(events))):
            match decision:
                case Stop(index=index):
                    lengths[index] = min(step, lengths[index])
                case Cut(index=index, tokens=tokens):
                    lengths[index] = tokens
    return Replay(tuple(lengths), tuple(c.index for c in group.candidates if c.selected_as is not None), step)
