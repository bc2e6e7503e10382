"""An engine whose candidates have known truths, and that reports them to a group in any order.

Every test that runs a world also checks that the group's decisions are possible.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Self

import numpy as np

from darts_server.group.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Deliver,
    Event,
    Failed,
    Finished,
    GiveUp,
    Keep,
    Lost,
    Progress,
    Scored,
    Start,
    Started,
    Stop,
)
from darts_server.group.group import Group, UniformGenerator
from darts_server.group.selection import SelectionRule
from darts_server.types import DiscardReason, FinishReason, SelectedAs
from tests.group.oracle import Fate, Rule, truncated

MAX_STEPS = 400
"""Steps after which a group counts as waiting for ever. No truth takes a tenth of them."""


class Draws:
    """Return the given random numbers in their order, then 0.99."""

    def __init__(self, *draws: float) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws, 0.99)


def running(
    rule: SelectionRule, candidates: int, chances: UniformGenerator | None = None, *, early: bool = False
) -> Group:
    """Return an open group whose candidates all run. ``chances``: random numbers for pruning."""
    group = Group(rng=np.random.default_rng(0), deliver_early=early, survival_rng=chances)
    group.open(rule, candidates)
    group.handle(*(Started(i) for i in range(candidates)))
    return group


class Ending(Enum):
    STOP = auto()
    LENGTH = auto()
    FAILED = auto()
    REFUSED = auto()
    """The candidate fails before it starts."""
    BROKEN = auto()
    """The candidate fails, and all other candidates would fail too."""
    LOST = auto()


class Peek(Enum):
    CHECKS = auto()
    """Progress is reported when a check is due, in the same step."""
    EVERYTHING = auto()
    """Progress of every running candidate is reported in every step."""
    NOW_AND_THEN = auto()
    """Progress is reported late, unnecessarily, out of date, or never."""


@dataclass(frozen=True, slots=True)
class Truth:
    """A candidate that starts after ``delay`` steps, gets ``speed`` tokens a step, and ends at ``length`` tokens."""

    length: int
    ending: Ending = Ending.STOP
    delay: int = 0
    speed: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a candidate when it has generated ``tokens``."""

    tokens: int
    quality: float
    survival: float


@dataclass(frozen=True)
class Case:
    """Parameters of a world. ``seed`` determines the group's random numbers, ``order`` the order of events.

    ``at_once``: whether the events of a step are reported in one call, and not in calls of any size. ``limits``:
    deadlines by the step that sets them, with a cut length that is ``slack`` more. ``additions``: steps that add one
    candidate each. ``opening``: step that opens the group, after deadlines and additions of this step. ``scores``:
    scores of each candidate by index, or empty. ``chances``: seed for pruning, or None to prune nothing.
    """

    rule: Rule
    candidates: int
    truths: Sequence[Truth]
    early: bool
    seed: int
    order: int
    peek: Peek = Peek.CHECKS
    replacements: int = 0
    at_once: bool = False
    limits: Mapping[int, int] = field(default_factory=dict)
    slack: int | None = None
    additions: Sequence[int] = ()
    opening: int = 0
    scores: Sequence[Sequence[Score]] = ()
    chances: int | None = None

    def world(self) -> "World":
        group = Group(
            rng=np.random.default_rng(self.seed),
            max_replacements=self.replacements,
            deliver_early=self.early,
            survival_rng=None if self.chances is None else np.random.default_rng(self.chances),
        )
        return World(self, group, Random(self.order))


@dataclass(slots=True)
class Run:
    """A candidate in the engine."""

    truth: Truth
    born: int
    started: bool = False
    tokens: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """A decision to stop a candidate: its step, and the candidate's tokens, true and ``known`` to the group."""

    step: int
    tokens: int
    known: int
    reason: DiscardReason


@dataclass(slots=True)
class World:
    """A group and its engine. ``order``: generator of the order of events."""

    case: Case
    group: Group
    order: Random

    step: int = 0
    limit: int | None = None
    cut_length: int | None = None
    finished_before: set[int] = field(default_factory=set)
    """Candidates that finished before the cut length applied."""
    at_opening: Mapping[int, int] = field(default_factory=dict)
    """Tokens of each candidate when the group was opened."""
    whole: frozenset[int] = frozenset()
    """Candidates that were delivered before there was a deadline."""
    in_all: int = 0
    """Number of candidates that were started until the group was open, without replacements."""
    runs: list[Run] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    """Reported tokens of each candidate that runs according to the group."""
    finished: dict[int, Fate] = field(default_factory=dict)
    """Fates of the candidates that were reported as finished."""
    failed: dict[int, Event] = field(default_factory=dict)
    broken: bool = False
    """Whether a failure was reported that is not retryable."""
    stopped: dict[int, Stopped] = field(default_factory=dict)
    cuts: dict[int, int] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)
    """Product of the probabilities with which each candidate was kept."""
    delivered: dict[int, int] = field(default_factory=dict)
    """Step in which each candidate was delivered."""
    gone: frozenset[int] = frozenset()
    """Candidates that had failed or been stopped at the latest failure or pruning. They cannot be selected."""
    selection: Mapping[int, SelectedAs] | None = None
    gave_up: Exception | None = None

    @property
    def pruned(self) -> set[int]:
        return {i for i, stop in self.stopped.items() if stop.reason is DiscardReason.PRUNED}

    # --- running -------------------------------------------------------------

    def run(self) -> Self:
        for _ in self.moments():
            pass
        return self

    def moments(self) -> Iterator[None]:
        """Run until the group has ended, and yield after each call of the group."""
        if 0 in self.case.limits:
            self.report(self._limit(self.case.limits[0]))
        yield from self._open()
        while self.group.outcome is None:
            self.step += 1
            assert self.step < MAX_STEPS, "the group waits for ever"
            yield from self._report_in_parts(self._step())
            yield from self._open()
            yield from self._report()

    def _open(self) -> Iterator[None]:
        for _ in range(self.case.additions.count(self.step)):
            self.act(self.group.add_candidate())
            self.in_all = len(self.runs)
        if self.step == self.case.opening:
            alive = len(self.runs) - len(self.failed)
            self.in_all = len(self.runs) + max(0, self.case.candidates - alive)
            self.at_opening = {i: run.tokens for i, run in enumerate(self.runs)}
            self.act(self.group.open(self.case.rule, self.case.candidates))
            yield

    def _limit(self, tokens: int) -> DeadlineSet:
        return DeadlineSet(tokens, None if self.case.slack is None else tokens + self.case.slack)

    def _report_in_parts(self, events: Sequence[Event]) -> Iterator[None]:
        while events:
            count = len(events) if self.case.at_once else self.order.randint(1, len(events))
            self.report(*events[:count])
            events = events[count:]
            yield

    def report(self, *events: Event) -> None:
        ended_before = self.group.outcome is not None
        for event in events:
            self._record(event)
        decisions = self.group.handle(*events)
        assert not (ended_before and decisions), "a group that has ended decides nothing"
        assert self.group.is_open or self.broken or not decisions, "decided before it was open"
        self.act(decisions)

    def _record(self, event: Event) -> None:
        """Record what the group knows after an event."""
        self.broken |= isinstance(event, Failed) and not event.retryable
        if isinstance(event, DeadlineSet):
            if self.limit is None and self.group.outcome is None:
                self.limit = event.tokens
                self.cut_length = event.cut_length
                self.whole = frozenset(self.delivered)
        elif event.index in self.known:
            match event:
                case Progress(i, tokens):
                    self.known[i] = max(self.known[i], tokens)
                case Finished(i, tokens, reason):
                    del self.known[i]
                    self.finished[i] = Fate(tokens, reason is FinishReason.STOP, self.draw(i))
                    if self.cut_length is None or not self.group.is_open:
                        self.finished_before.add(i)
                case Failed(i) | Lost(i):
                    del self.known[i]
                    self.failed[i] = event
                    self.gone = frozenset(self.failed) | frozenset(self.stopped)

    # --- what happens in a step ---------------------------------------------

    def _step(self) -> list[Event]:
        queues = [self._advance(i, run) for i, run in enumerate(self.runs) if not run.over]
        if self.step in self.case.limits:
            queues.append([self._limit(self.case.limits[self.step])])
        queues = [queue for queue in queues if queue]
        events: list[Event] = []
        while queues:
            queue = self.order.choice(queues)
            events.append(queue.pop(0))
            queues = [queue for queue in queues if queue]
        return events

    def _advance(self, i: int, run: Run) -> list[Event]:
        if i not in self.known:
            return self._late_events(i, run)
        if self.step < run.born + run.truth.delay:
            return []
        if run.truth.ending is Ending.REFUSED:
            run.over = True
            return [self._end(i)]
        events: list[Event] = [] if run.started else [Started(i)]
        run.started = True
        before = run.tokens
        if self.case.peek is Peek.NOW_AND_THEN and self.order.random() < 0.3:
            out_of_date = Progress(i, self.order.randint(0, run.tokens))
            events.append(out_of_date if self.order.random() < 0.5 else Scored(i, 0.5))
        run.tokens = min(run.truth.length, run.tokens + run.truth.speed)
        if run.tokens == run.truth.length:
            run.over = True
            events.append(self._end(i))
            if isinstance(events[-1], Finished) and self.order.random() < 0.2:
                events.append(Progress(i, run.tokens))
        return self._with_scores(i, before, events) if self.case.scores else events

    def _with_scores(self, i: int, before: int, events: list[Event]) -> list[Event]:
        """Add the scores that are due since it had ``before`` tokens. They may be later than the finish."""
        due = [score for score in self.case.scores[i] if before < score.tokens <= self.runs[i].tokens]
        scored = [Scored(i, score.quality, score.survival) for score in due]
        place = 1 if events and isinstance(events[0], Started) else 0
        if any(isinstance(event, Finished) for event in events) and self.order.random() < 0.5:
            place = len(events)
        return [*events[:place], *scored, *events[place:]]

    def _late_events(self, i: int, run: Run) -> list[Event]:
        """Return what the engine reports about a stopped candidate: its end, or nothing."""
        run.over = True
        started: list[Event] = [] if run.started else [Started(i)]
        words: list[Event] = [Progress(i, run.tokens), Lost(i), Finished(i, run.tokens + 1, FinishReason.LENGTH)]
        return self.order.choice([[], [*started, self.order.choice(words)]])

    def _end(self, i: int) -> Event:
        match self.runs[i].truth.ending:
            case Ending.STOP:
                return Finished(i, self.runs[i].tokens, FinishReason.STOP)
            case Ending.LENGTH:
                return Finished(i, self.runs[i].tokens, FinishReason.LENGTH)
            case Ending.LOST:
                return Lost(i)
            case ending:
                return Failed(i, RuntimeError(f"candidate {i}"), retryable=ending is not Ending.BROKEN)

    # --- reporting progress -------------------------------------------------

    def _report(self) -> Iterator[None]:
        if self.case.peek is Peek.EVERYTHING:
            yield from self._report_in_parts(self._progress(list(self.known)))
        elif self.case.peek is Peek.CHECKS or self.order.random() < 0.5:
            while due := self._progress(self._due()):
                yield from self._report_in_parts(due)
                silent = all(self.group.check_at.get(event.index, event.tokens + 1) > event.tokens for event in due)
                assert silent, "a check that was made is still due"

    def _progress(self, indices: list[int]) -> list[Progress]:
        self.order.shuffle(indices)
        return [Progress(i, self.runs[i].tokens) for i in indices if self.runs[i].started and not self.runs[i].over]

    def _due(self) -> list[int]:
        return [i for i, tokens in self.group.check_at.items() if self.runs[i].tokens >= tokens]

    # --- doing what the group wants -----------------------------------------

    def act(self, decisions: Sequence[Decision]) -> None:
        self._prune(decisions)
        for decision in decisions:
            ended = self.selection is not None or self.gave_up is not None
            assert not ended, f"decided after the end: {decision}"
            match decision:
                case Start(indices):
                    self._start(indices)
                case Stop(i, reason):
                    assert i in self.known, f"stopped, but was not running: {i}"
                    self.stopped[i] = Stopped(self.step, self.runs[i].tokens, self.known.pop(i), reason)
                case Cut(i, tokens):
                    self._cut(i, tokens)
                case Deliver(i):
                    assert i in self.finished, f"delivered before it finished: {i}"
                    assert i not in self.delivered, f"delivered twice: {i}"
                    self.delivered[i] = self.step
                case Complete(selection):
                    self.selection = selection
                case GiveUp(error):
                    self.gave_up = error
        assert self.group.check_at.keys() <= self.known.keys(), "a check of a candidate that does not run"
        is_whole = self.group.is_open and len(self.delivered) == self.case.rule.size
        assert not is_whole or self.group.outcome is not None, "nothing runs once all are delivered"

    def _prune(self, decisions: Sequence[Decision]) -> None:
        """Record the candidates that were pruned and kept. Each decision precedes its consequences."""
        stopped = set(self.stopped)
        returnable = len(self.known) + sum(fate.valid for fate in self.finished.values())
        for decision in decisions:
            match decision:
                case Start(indices):
                    returnable += len(indices)
                case Keep(i, survival):
                    assert i in self.known
                    self.kept[i] = self.kept.get(i, 1.0) * survival
                case Stop(i, DiscardReason.PRUNED):
                    stopped.add(i)
                    returnable -= 1
                    self.gone = frozenset(self.failed) | stopped
                    assert returnable >= self.case.rule.min_remaining, "pruned below what the group needs"

    def _start(self, indices: Sequence[int]) -> None:
        assert tuple(indices) == tuple(range(len(self.runs), len(self.runs) + len(indices)))
        for i in indices:
            self.runs.append(Run(self.case.truths[i], born=self.step))
            self.known[i] = 0

    def _cut(self, i: int, tokens: int) -> None:
        assert self.limit is not None
        assert tokens >= self.limit
        assert self.cut_length is None or tokens <= self.cut_length
        assert i not in self.delivered, f"delivered whole, and cut: {i}"
        if i in self.known:
            assert self.known.pop(i) >= tokens
        else:
            assert self.finished[i].length > tokens
        self.cuts[i] = tokens
        self.finished[i] = Fate(tokens, valid=False, tail_draw=self.draw(i))

    # --- truths -------------------------------------------------------------

    def draw(self, i: int) -> float:
        return self.group.candidates[i].tail_draw

    def fates(self) -> dict[int, Fate]:
        """Return the end of every started candidate if the group stopped none. The cut length applies."""
        ends = {
            i: Fate(run.truth.length, run.truth.ending is not Ending.LENGTH, self.draw(i))
            for i, run in enumerate(self.runs)
        }
        return dict(truncated(self.case.rule, ends, self.cut_length, self.finished_before))
