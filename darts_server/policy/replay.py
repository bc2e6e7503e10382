"""What a rule would have done with candidates whose lengths are known, had they run side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.events import Cut, DeadlineSet, Event, Finished, Progress, Started, Stop
from darts_server.policy.group import Group
from darts_server.policy.selection.rules import SelectionRule
from darts_server.types import FinishReason


@dataclass(frozen=True, slots=True)
class Replay:
    """``lengths``: tokens of each candidate when it ended or was stopped or cut. ``selection``: indices of the group.
    ``steps``: decode steps until it was complete.
    """

    lengths: tuple[int, ...]
    selection: tuple[int, ...]
    steps: int

    @property
    def generated(self) -> int:
        return sum(self.lengths)

    @property
    def returned(self) -> int:
        return sum(self.lengths[i] for i in self.selection)


def replay(rule: SelectionRule, candidates: Sequence[Candidate], deadline: int | None = None) -> Replay:
    """Run ``candidates``, all finished and at least ``rule.size``, at one token a step from one start.

    Their lots are kept. ``deadline``: the group's deadline in tokens, known from the start.
    """
    group = Group(rng=_Lots(c.tail_draw for c in candidates), spare=0)
    group.open(rule, len(candidates))
    step, lengths = 0, [c.tokens for c in candidates]
    group.handle(*([] if deadline is None else [DeadlineSet(deadline)]), *(Started(i) for i in range(len(candidates))))
    while group.outcome is None:
        running = [c.index for c in group.candidates if c.running]
        # An alarm may be at a count that has been passed already: it is answered in the same step.
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
    events: list[Event] = []
    for i in running:
        if candidates[i].tokens <= step:
            events.append(Finished(i, candidates[i].tokens, candidates[i].finish_reason or FinishReason.STOP))
        elif check_at.get(i, step + 1) <= step:
            events.append(Progress(i, step))
    return events


class _Lots:
    """Numbers that were drawn before."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)
