"""Replay a selection rule on finished candidates as if they had run at the same time.

The result is exact, because the same state machine decides as on a real engine.
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
    """Outcome of a replay."""

    lengths: tuple[int, ...]
    """Tokens of each candidate when it finished, or was stopped or cut."""
    selection: tuple[int, ...]
    """Indices of the returned candidates."""
    steps: int
    """Decode steps until the group was complete."""

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(self.lengths)

    @property
    def returned(self) -> int:
        """Tokens of the returned trajectories."""
        return sum(self.lengths[i] for i in self.selection)


class _Draws:
    """A generator that repeats random numbers."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)


def replay(
    rule: SelectionRule,
    candidates: Sequence[Candidate],
    deadline: int | None = None,
    cut_length: int | None = None,
) -> Replay:
    """Run finished candidates again, with their tail draws. All start together and get one token a step.

    Args:
        candidates: at least ``rule.size``.
        deadline: the cohort's deadline in tokens, set at the start.
        cut_length: length in tokens at which every candidate is cut.
    """
    group = Group(rng=_Draws(c.tail_draw for c in candidates), max_replacements=0)
    group.open(rule, len(candidates))
    lengths = [c.tokens for c in candidates]
    by_length = deque(sorted(range(len(candidates)), key=lambda i: lengths[i]))
    start: list[Event] = [Started(i) for i in range(len(candidates))]
    if deadline is not None:
        start.insert(0, DeadlineSet(deadline, cut_length))
    group.handle(*start)

    step = 0
    while group.outcome is None:
        while not group.candidates[by_length[0]].is_running:
            by_length.popleft()

        # Continue with the next step at which anything can happen. A check may be due at a count that was passed
        # already; it belongs to the same step.
        step = max(step, min([candidates[by_length[0]].tokens, *group.check_at.values()]))
        events: dict[int, Event] = {i: Progress(i, step) for i, tokens in group.check_at.items() if tokens <= step}
        while by_length and candidates[by_length[0]].tokens <= step:
            i = by_length.popleft()
            finished = candidates[i]
            if group.candidates[i].is_running:
                events[i] = Finished(i, finished.tokens, finished.finish_reason or FinishReason.STOP)

        for decision in group.handle(*(events[i] for i in sorted(events))):
            match decision:
                case Stop(index=index):
                    lengths[index] = min(step, lengths[index])
                case Cut(index=index, tokens=tokens):
                    lengths[index] = tokens
    selection = tuple(c.index for c in group.candidates if c.selected_as is not None)
    return Replay(tuple(lengths), selection, step)
