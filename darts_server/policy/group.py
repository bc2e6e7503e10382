"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rule=Shortest(8), candidates=12, rng=rng, spare=8)
    act_on(group.open())
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

Every candidate that was started ends exactly once, selected or discarded with one reason. What is decided is never
taken back: a stopped candidate does not return and a delivered one stays in the group.
"""

from collections.abc import Iterator

import numpy as np

from darts_server.exceptions import GroupFailed, IllegalMove
from darts_server.policy.candidate import Candidate
from darts_server.policy.events import (
    Complete,
    Cut,
    Decision,
    Deliver,
    Event,
    Failed,
    GiveUp,
    LimitSet,
    Lost,
    Scored,
    Start,
    Started,
    Stop,
)
from darts_server.policy.selection import SelectionRule, Verdict
from darts_server.types import Outcome, StopReason


class Group:
    """One prompt's group.

    Args:
        rule: how the group is chosen; its ``size`` is the number of trajectories returned.
        candidates: how many to start at first, at least ``rule.size``.
        rng: the group's own generator; it numbers the lots of the tail.
        spare: how many more may be started, in all, to replace candidates that failed.
        early: decide ``Deliver`` as soon as a trajectory is known to belong, for callers that stream.
    """

    def __init__(
        self, *, rule: SelectionRule, candidates: int, rng: np.random.Generator, spare: int, early: bool = False
    ) -> None:
        if candidates < rule.size:
            raise ValueError(f"candidates must be at least the group size {rule.size}, got {candidates}")
        self.size = rule.size
        self.candidates: list[Candidate] = []
        self.outcome: Outcome | None = None
        self.alarms: dict[int, int] = {}
        """Running candidate -> token count at which its progress should be reported. Nobody need look before."""
        self._rule = rule
        self._initial = candidates
        self._rng = rng
        self._spare = spare
        self._early = early
        self._limit: int | None = None
        self._delivered: set[int] = set()
        self._undecided = True  # something was heard that may change what is certain

    def open(self) -> list[Decision]:
        """The first candidates to start."""
        if self.candidates:
            raise IllegalMove("the group is open already")
        return [self._start(self._initial)] if self.outcome is None else []

    def handle(self, *events: Event) -> list[Decision]:
        """Take events in, in their order, and say what to do about them.

        Raises:
            IllegalMove: an event that cannot happen; nothing is decided.
        """
        last_error: Exception | None = None
        for event in events:
            last_error = self._hear(event) or last_error
        if self.outcome is not None or not self.candidates or not self._undecided:
            return []
        self._undecided = False
        return list(self._decide(last_error))

    def cancel(self) -> list[Decision]:
        """The caller went away: stop everything."""
        return list(self._close(Outcome.CANCELLED)) if self.outcome is None else []

    # --- hearing ------------------------------------------------------------

    def _hear(self, event: Event) -> Exception | None:
        if not isinstance(event, Started | Scored):  # these make nobody certain or hopeless
            self._undecided = True
        if isinstance(event, LimitSet):
            self._limit = event.tokens
            return None
        if not 0 <= event.index < len(self.candidates):
            raise IllegalMove(f"no candidate {event.index} was started: {event}")
        self.candidates[event.index].hear(event)
        if isinstance(event, Failed):
            if not event.retryable:
                self._spare = 0
            return event.error
        return GroupFailed(f"the engine aborted candidate {event.index}") if isinstance(event, Lost) else None

    # --- deciding -----------------------------------------------------------

    def _decide(self, last_error: Exception | None) -> Iterator[Decision]:
        missing = self.size - sum(c.alive for c in self.candidates)
        if missing > self._spare:
            yield from self._give_up(last_error, missing)
            return
        if missing > 0:  # from now on all that are left are needed, so what was delivered or cut stays in the group
            yield self._start(missing)
            self._spare -= missing
        verdict = self._assess()
        yield from self._stop_hopeless(verdict)
        if cuts := list(self._cut(verdict)):
            yield from cuts
            verdict = self._assess()
        if len(verdict.settled) == self.size:
            yield from self._complete()
            return
        self.alarms = dict(verdict.alarms)
        if self._limit is not None:
            self.alarms |= {i: self._limit for i in verdict.tail if self.candidates[i].running}
        if self._early:
            yield from self._deliver(verdict)

    def _assess(self) -> Verdict:
        running = [c for c in self.candidates if c.running]
        return self._rule.assess(running, self._finished(), self._early)

    def _finished(self) -> list[Candidate]:
        return [c for c in self.candidates if c.alive and not c.running]

    def _start(self, count: int) -> Start:
        first = len(self.candidates)
        self.candidates += [Candidate(index, draw=float(self._rng.random())) for index in range(first, first + count)]
        return Start(tuple(range(first, first + count)))

    def _stop_hopeless(self, verdict: Verdict) -> Iterator[Decision]:
        for index, reason in verdict.hopeless.items():
            self.candidates[index].discard(reason)
            yield Stop(index, reason)

    def _cut(self, verdict: Verdict) -> Iterator[Cut]:
        """Cut the tail at the limit, whether it still runs or ended beyond it before anyone looked."""
        if self._limit is None:
            return
        for index in sorted(verdict.tail - self._delivered):
            candidate = self.candidates[index]
            if candidate.tokens >= self._limit if candidate.running else candidate.tokens > self._limit:
                candidate.cut_at(self._limit)
                yield Cut(index, self._limit)

    def _deliver(self, verdict: Verdict) -> Iterator[Decision]:
        for index in sorted(verdict.settled - self._delivered):
            self._delivered.add(index)
            yield Deliver(index)

    # --- ending -------------------------------------------------------------

    def _complete(self) -> Iterator[Decision]:
        selection = self._rule.select(self._finished())
        for candidate in self.candidates:
            if candidate.index in selection:
                candidate.select(selection[candidate.index])
            elif candidate.alive:
                candidate.discard(self._rule.surplus(candidate))
        self.outcome = Outcome.COMPLETED
        self.alarms = {}
        yield Complete(dict(sorted(selection.items())))

    def _give_up(self, last_error: Exception | None, missing: int) -> Iterator[Decision]:
        error = last_error or GroupFailed(f"{missing} of {self.size} trajectories are missing")
        yield from self._close(Outcome.FAILED)
        yield GiveUp(error)

    def _close(self, outcome: Outcome) -> Iterator[Decision]:
        for candidate in self.candidates:
            if candidate.running:
                yield Stop(candidate.index, StopReason.CANCELLED)
            if candidate.alive:
                candidate.discard(StopReason.CANCELLED)
        self.outcome = outcome
        self.alarms = {}
