"""Simulate a rollout: the production `Group` on a virtual clock, over engines with continuous batching.

Usage::

    rollout = simulate(batch, Plan(8, [12] * batch.groups, shaping), machine)
    rollout.seconds, rollout.generated.sum()

Groups are driven as by the server: by their candidates' ends, by progress where the group says that it matters, and by
the deadline that the cohort's groups determine together. What the server does a little later, since it polls every
20 ms, happens here in the same decode step. What one engine learns from another reaches it at the end of the step that
it is in.

Nothing is computed token by token: an engine advances to the next step at which anything can happen.
"""

from bisect import bisect_left
from collections.abc import Sequence as Values
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.cohort_deadline import CohortDeadline, place_of_need
from darts_server.policy.events import Complete, Cut, DeadlineSet, Decision, Event, Finished, Progress, Started, Stop
from darts_server.policy.group import Group, RecordedDraws
from darts_server.policy.group_weights import selection_weights
from darts_server.policy.selection.rules import SelectionRule
from darts_server.policy.simulation.batch import Batch, Plan
from darts_server.policy.simulation.machine import Machine
from darts_server.policy.simulation.replica import Replica, Sequence
from darts_server.types import FinishReason

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Returned:
    """A returned trajectory. ``weight``: see `selection_weights`; ``None`` if the group has none."""

    group: int
    index: int
    tokens: int
    truncated: bool
    weight: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Outcome of a simulated rollout of G prompts with C candidates each.

    ``seconds``: until all groups are complete, or enough of them. ``generated``: tokens of each candidate, shape
    (G, C), without those of earlier rollouts. ``returned``: trajectories of complete groups. ``completed_at``: seconds
    at which each group was complete; infinite if it was not. ``started_at``, ``ended_at``: seconds at which each
    candidate ran first, and at which it ended or was stopped, shape (G, C); infinite if it did not. ``replicas``: the
    engine of each group. ``busy``: share of places that were taken, of the most that each engine ever ran, over the
    whole rollout. ``preemptions``: how often a sequence was preempted. ``deadline``: the cohort's, in tokens.
    ``completion_lengths``: of complete groups, in the order of their ends, for `RecentCompletionLengths`.
    """

    seconds: float
    generated: Ints
    returned: tuple[Returned, ...]
    completed_at: Floats
    started_at: Floats
    ended_at: Floats
    replicas: Ints
    busy: float
    preemptions: int
    deadline: int | None
    completion_lengths: tuple[int, ...]


def simulate(batch: Batch, plan: Plan, machine: Machine) -> Rollout:
    """Simulate one rollout, in which all prompts are submitted at once.

    Raises:
        ValueError: the batch does not fit the plan, or a sequence does not fit into an engine.
    """
    plan.check(batch)
    return _Simulation(batch, plan, machine).run()


def place_groups(candidates: Values[int], replicas: int) -> list[int]:
    """Return the engine of each group: in order of arrival, the one with the fewest candidates so far."""
    load = [0] * replicas
    placed = []
    for count in candidates:
        placed.append(load.index(min(load)))
        load[placed[-1]] += count
    return placed


@dataclass(slots=True, eq=False)
class _Member:
    """A group in the simulation, with the sequences of its candidates."""

    number: int
    engine: Replica
    group: Group
    rule: SelectionRule
    sequences: list[Sequence]
    place: int
    unfinished: list[int]
    """Candidates that run or wait in the engine, in order."""
    need: int | None = None
    """The tokens that it has reported to need."""
    beyond: int | None = None
    """The limit that it reported to be beyond, see `CohortDeadline.waits_beyond`."""
    deadline: DeadlineSet | None = None
    """That has not reached it yet."""
    deadline_step: float = inf
    wake: float = inf
    """The engine's step at which something may happen to it next."""

    @property
    def has_reported(self) -> bool:
        return self.need is not None

    @property
    def was_cut(self) -> bool:
        return any(candidate.cut for candidate in self.group.candidates)

    def events(self) -> list[Event]:
        """Return what has happened to its candidates by now."""
        step, checks = self.engine.step, self.group.check_at
        events: list[Event] = []
        for index in self.unfinished:
            sequence = self.sequences[index]
            if sequence.offset is not None and step - sequence.offset == sequence.end:
                events.append(_finished(sequence))
            elif index in checks and (tokens := self.engine.tokens(sequence)) >= checks[index]:
                events.append(Progress(index, tokens))
        if self.deadline is not None and step >= self.deadline_step:
            events.append(self.deadline)
            self.deadline, self.deadline_step = None, inf
        return events

    def next_step(self, limit: int | None, earliest: int) -> float:
        """Return the next step at which `events` are not empty, or at which it can report to be beyond ``limit``.

        ``earliest``: the first step at which it can hear of the limit.
        """
        step = self.deadline_step
        for index in self.unfinished:
            sequence = self.sequences[index]
            if sequence.offset is not None:
                step = min(step, sequence.offset + sequence.end)
        for index, tokens in self.group.check_at.items():
            sequence = self.sequences[index]
            if sequence.offset is not None:
                step = min(step, max(self.engine.step, sequence.offset + tokens))
            elif sequence.tokens >= tokens:
                step = self.engine.step
        if limit is not None and limit != self.beyond and not self.has_reported:
            step = min(step, self._step_beyond(limit, earliest))
        return step

    def is_beyond(self, limit: int, step: int) -> bool:
        """Whether it can only be complete with more than ``limit`` tokens, if nothing ends before ``step``."""
        minimum = self.minimum(step)
        return minimum is None or minimum > limit

    def minimum(self, step: int) -> int | None:
        """Return the least that it can need, if nothing ends before ``step``; see `Standings.nth_shortest_minimum`."""
        generated = {i: s.tokens if s.offset is None else step - s.offset for i, s in self._running()}
        return self.group.standings.nth_shortest_minimum(self.place, generated)

    def _step_beyond(self, limit: int, earliest: int) -> float:
        """Return the step at which `is_beyond` becomes true, if nothing ends before; infinite if that is not known."""
        passing = {max(earliest, s.offset + limit) for _, s in self._running() if s.offset is not None}
        steps = sorted({earliest, *passing})
        found = bisect_left(steps, True, key=lambda step: self.is_beyond(limit, step))
        return steps[found] if found < len(steps) else inf

    def _running(self) -> list[tuple[int, Sequence]]:
        return [(index, self.sequences[index]) for index in self.unfinished]


def _finished(sequence: Sequence) -> Finished:
    return Finished(sequence.index, sequence.end, FinishReason.STOP if sequence.is_valid else FinishReason.LENGTH)


class _Simulation:
    def __init__(self, batch: Batch, plan: Plan, machine: Machine) -> None:
        plan.check(batch)
        self._plan = plan
        self._engines = [Replica(machine) for _ in range(machine.replicas)]
        self._placed = place_groups(plan.candidates, machine.replicas)
        self._members = [self._member(batch, number) for number in range(batch.groups)]
        self._rule = plan.deadline
        self._cohort = CohortDeadline(self._rule, batch.groups)
        self._of = {engine: [m for m in self._members if m.engine is engine] for engine in self._engines}
        self._wakes: dict[Replica, list[tuple[float, int]]] = {engine: [] for engine in self._engines}
        self._steps: dict[Replica, float] = {}
        """The step of each engine at which something may happen next."""
        self._times: dict[Replica, float] = {}
        """The seconds at which that step ends."""
        self._missing = batch.groups if plan.enough is None else plan.enough
        self._done = batch.done
        self._ended_at = np.full(batch.lengths.shape, inf)
        self._completed_at = np.full(batch.groups, inf)

    def _member(self, batch: Batch, number: int) -> _Member:
        count, rule = self._plan.candidates[number], self._plan.rule(number)
        prompt = int(batch.prompt_tokens[number])
        ends, valid = batch.ends[number].tolist(), batch.valid[number].tolist()
        done = [0] * count if batch.done is None else batch.done[number].tolist()
        return _Member(
            number=number,
            engine=self._engines[self._placed[number]],
            group=Group(rng=RecordedDraws(batch.tail_draws[number].tolist()), max_replacements=0),
            rule=rule,
            sequences=[Sequence(number, i, prompt, ends[i], valid[i], done[i]) for i in range(count)],
            place=place_of_need(rule.completion_place, count, self._plan.mean_candidates),
            unfinished=[i for i in range(count) if done[i] < ends[i]],
        )

    # --- the clock ----------------------------------------------------------

    def run(self) -> Rollout:
        for member in self._members:
            decisions = member.group.open(member.rule, len(member.sequences))
            started = [Started(sequence.index) for sequence in member.sequences]
            for index in member.unfinished:
                member.engine.submit(member.sequences[index])
            decisions += member.group.handle(*started, *(_finished(s) for s in member.sequences if s.tokens == s.end))
            self._act(member, decisions)
        for engine in self._engines:
            self._schedule(engine)
        if self._cohort.tokens is not None:
            self._set_deadline(self._engines[0])
        while self._missing:
            self._process(min(self._times, key=self._times.__getitem__))
        return self._outcome()

    def _process(self, engine: Replica) -> None:
        """Go on to the engine's next step at which anything may happen, and let it happen."""
        engine.advance(int(self._steps[engine]))
        wakes = self._wakes[engine]
        is_due = True
        while is_due:
            while self._missing and wakes and wakes[0][0] <= engine.step:
                step, number = heappop(wakes)
                member = self._members[number]
                if member.wake == step:
                    member.wake = inf
                    self._update(member)
            if not self._missing:
                return
            self._schedule(engine)
            is_due = bool(wakes) and wakes[0][0] <= engine.step

    def _schedule(self, engine: Replica) -> None:
        """Let the engine admit and preempt sequences."""
        for number in {sequence.group for sequence in engine.schedule()}:
            self._set_wake(self._members[number])
        self._set_time(engine)

    def _next_step(self, engine: Replica) -> float:
        wakes = self._wakes[engine]
        while wakes and self._members[wakes[0][1]].wake != wakes[0][0]:
            heappop(wakes)
        return min(wakes[0][0] if wakes else inf, engine.next_limit)

    def _set_time(self, engine: Replica) -> None:
        step = self._steps[engine] = self._next_step(engine)
        self._times[engine] = inf if step == inf else engine.now + engine.seconds(int(step) - engine.step)

    def _set_wake(self, member: _Member, earliest: int | None = None) -> None:
        step, now = inf, member.engine.step
        if member.group.outcome is None:
            step = member.next_step(self._cohort.waits_beyond, now if earliest is None else earliest)
        if step != member.wake:
            member.wake = step
            if step != inf:
                heappush(self._wakes[member.engine], (step, member.number))

    # --- groups -------------------------------------------------------------

    def _update(self, member: _Member) -> None:
        """Pass to a group what has happened to it, and carry out what it decides."""
        tokens, limit = self._cohort.tokens, self._cohort.waits_beyond
        events = member.events()
        for event in events:
            if isinstance(event, Finished):
                self._end(member, event.index)
        decisions = member.group.handle(*events)
        if self._rule is not None and not member.has_reported:
            self._report(member)
        self._act(member, decisions)
        self._set_wake(member)
        if self._cohort.tokens != tokens:
            self._set_deadline(member.engine)
        elif self._cohort.waits_beyond != limit:
            self._set_limit(member.engine)

    def _report(self, member: _Member) -> None:
        """Report what a group needs or, if the cohort wants to know, that it needs more than others allow."""
        need, limit = member.group.standings.nth_shortest(member.place), self._cohort.waits_beyond
        if need is not None:
            member.need = need
            self._cohort.report_need(member.number, need)
        elif limit not in (None, member.beyond) and member.is_beyond(limit, member.engine.step):
            member.beyond = limit
            self._cohort.report_minimum(member.number, member.minimum(member.engine.step))

    def _act(self, member: _Member, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Stop(index=index):
                    self._end(member, index)
                case Cut(index=index) if index in member.unfinished:
                    self._end(member, index)
                case Complete():
                    self._completed_at[member.number] = member.engine.now
                    self._missing -= 1
                    self._cohort.remove(member.number)

    def _end(self, member: _Member, index: int) -> None:
        """Remove a candidate that has ended or was stopped from its engine."""
        member.unfinished.remove(index)
        member.engine.remove(member.sequences[index])
        self._ended_at[member.number, index] = member.engine.now

    # --- the cohort ---------------------------------------------------------

    def _set_deadline(self, engine: Replica) -> None:
        """Send the deadline to all groups."""
        assert self._rule is not None
        assert self._cohort.tokens is not None
        deadline = DeadlineSet(self._cohort.tokens, self._rule.bound_of(self._cohort.tokens))
        for other, earliest in self._earliest(engine).items():
            for member in self._of[other]:
                if member.group.outcome is None:
                    member.deadline, member.deadline_step = deadline, earliest
                    self._set_wake(member)
            self._set_time(other)

    def _set_limit(self, engine: Replica) -> None:
        """Send the limit beyond which groups shall report to those that have not."""
        for other, earliest in self._earliest(engine).items():
            for member in self._of[other]:
                if not member.has_reported:
                    self._set_wake(member, earliest)
            self._set_time(other)

    def _earliest(self, engine: Replica) -> dict[Replica, int]:
        """Return the step of each engine at which what has happened in ``engine`` is known there."""
        return {
            other: other.step + (0 if other is engine else other.steps_until(engine.now)) for other in self._engines
        }

    # --- the outcome --------------------------------------------------------

    def _outcome(self) -> Rollout:
        seconds = float(self._completed_at[np.isfinite(self._completed_at)].max())
        for engine in self._engines:
            steps = engine.steps_until(seconds)
            engine.advance(int(min(engine.step + steps, self._next_step(engine))))
        shape = self._ended_at.shape
        generated, started_at = np.zeros(shape, dtype=np.int64), np.full(shape, inf)
        returned, preemptions = [], 0
        for member in self._members:
            for sequence in member.sequences:
                at = member.number, sequence.index
                generated[at] = member.engine.tokens(sequence) - (0 if self._done is None else self._done[at])
                started_at[at] = sequence.started_at
                preemptions += sequence.preemptions
            weights = selection_weights(member.group)
            for c in member.group.candidates:
                if c.selected_as is not None:
                    returned.append(Returned(member.number, c.index, c.tokens, not c.valid, weights.get(c.index)))
        complete = [m for m in self._members if m.group.outcome is not None and (m.has_reported or m.was_cut)]
        complete.sort(key=lambda member: float(self._completed_at[member.number]))
        peak = sum(engine.peak for engine in self._engines)
        return Rollout(
            seconds=seconds,
            generated=generated,
            returned=tuple(returned),
            completed_at=self._completed_at,
            started_at=started_at,
            ended_at=np.where(np.isfinite(started_at), np.minimum(self._ended_at, seconds), inf),
            replicas=np.asarray(self._placed, dtype=np.int64),
            busy=min(1.0, sum(engine.busy for engine in self._engines) / (peak * seconds)),
            preemptions=preemptions,
            deadline=self._cohort.tokens,
            completion_lengths=tuple(member.need or 0 for member in complete),
        )
