"""Simulate a rollout of sessions: trajectories with several turns, and tools between the turns.

Usage::

    rollout = SessionRollout(sessions, rngs, BatchPlan(8, [12] * len(sessions), shaping), machine)
    rollout.run()
    rollout.seconds, rollout.groups[0].runs[0].recomputed

Each prompt has a real `Group`, which decides which sessions are stopped. The length of a session is its generated
tokens over all turns, or the seconds since the rollout began.

An engine schedules as in `engines`, from event to event. A session in a tool leaves its place in the batch, and its
next turn is the last in the queue, as in vLLM. The KV caches of sessions that do not run stay until running sequences
need the space. Then the least recently used cache is evicted. If no cache is left, a sequence is preempted. An evicted
session computes its context again before its next turn.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from darts_server.group.events import Complete, Cut, DeadlineSet, Event, Finished, Progress, Started, Stop
from darts_server.group.group import Group, UniformGenerator
from darts_server.offline.simulation.model.batch import BatchPlan
from darts_server.offline.simulation.model.engines import TOLERANCE, Machine, place_groups
from darts_server.policy.deadline import CohortDeadline, place_of_need
from darts_server.types import FinishReason

NO_SESSION = -1
UNITS_PER_SECOND = 1_000_000
"""A group counts whole numbers, and the shortest decode steps take a millisecond."""


class Turn(NamedTuple):
    """A request of a session."""

    added: int
    """New tokens of the prompt: the whole prompt in the first turn, and then what the tool has added."""
    generated: int
    """At least 1."""
    tool_seconds: float = 0.0
    """Seconds in tools before the turn, 0 in the first turn."""


class Session(NamedTuple):
    """What a session does if nothing stops it. All sessions of a group have the same prompt."""

    turns: tuple[Turn, ...]
    valid: bool = True
    """Whether the session ends by itself, and not at a limit."""

    @property
    def tokens(self) -> int:
        return sum(turn.generated for turn in self.turns)


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    IN_TOOL = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class SessionRun:
    """A session in a rollout, and how much of the session has run."""

    session: Session
    group: int
    index: int
    context: int
    """Tokens of the context, without the current stay in the batch."""
    state: State = State.WAITING
    turns: int = 1
    """Turns that have begun."""
    tokens: int = 0
    """Generated tokens, without the current stay in the batch."""
    tool_seconds: float = 0.0
    recomputed: int = 0
    """Tokens that were computed again, after an eviction or preemption."""
    computed: int = 0
    """Tokens of the context that the engine has computed before."""
    admitted_at_step: float = 0.0
    """Step in which the current stay in the batch began."""
    tool_began_at: float = 0.0
    next_event_step: float = inf
    """Step at which the running session ends its turn or must report its progress."""

    @property
    def turn_end(self) -> int:
        """Generated tokens at the end of the turn."""
        return sum(turn.generated for turn in self.session.turns[: self.turns])

    @property
    def prompt(self) -> int:
        return self.session.turns[0].added

    def return_from_tool(self) -> None:
        turn = self.session.turns[self.turns]
        self.tool_seconds += turn.tool_seconds
        self.context += turn.added
        self.turns += 1
        self.state = State.WAITING


@dataclass(slots=True, eq=False)
class SessionGroup:
    group: Group
    runs: list[SessionRun]
    engine: "_Engine"
    place_of_need: int
    """Rank of the finished session whose length the group needs, see `policy.deadline`."""
    needed_length: int | None = None
    """None until it is known."""


# --- an engine --------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Engine:
    machine: Machine
    by_seconds: bool
    """Whether groups count time, see `SessionRollout`."""
    free_tokens: float
    """Tokens that still fit into the KV cache. Caches of sequences that do not run take space, too."""
    now: float = 0.0
    """Seconds at which the current step begins."""
    step: float = 0.0
    running: dict[SessionRun, None] = field(default_factory=dict)
    """In the order of admission."""
    waiting: deque[SessionRun] = field(default_factory=deque)
    idle_caches: dict[SessionRun, float] = field(default_factory=dict)
    """Tokens in the KV caches of sequences that do not run, the least recently used first."""
    prompt_holders: Counter[int] = field(default_factory=Counter)
    """Sessions of each group that are not over and have a KV cache. They share the cache of their prompt."""
    alarms: list[tuple[float, int, int]] = field(default_factory=lambda: [(inf, 0, NO_SESSION)])
    """Heap of seconds, with a group and the index of its session that returns from a tool. It is never empty."""
    context_tokens: float = 0.0
    extra_seconds: float = 0.0
    """Seconds by which the next step takes longer: prefills and starts."""
    planned: tuple[float, float] = (0.0, 0.0)
    """Steps until the next event, and the second at which they are done."""

    # --- the KV cache ---------------------------------------------------------

    def shared_cache_tokens(self, run: SessionRun) -> int:
        # A group shares the full blocks of its prompt.
        return run.prompt - run.prompt % self.machine.block_size

    def own_cache_tokens(self, run: SessionRun) -> float:
        # The last block of a sequence is half empty on average.
        return run.context - self.shared_cache_tokens(run) + (self.machine.block_size - 1) / 2

    def release_prompt(self, run: SessionRun) -> None:
        self.prompt_holders[run.group] -= 1
        if not self.prompt_holders[run.group]:
            self.free_tokens += self.shared_cache_tokens(run)

    def evict_oldest_cache(self, kept: SessionRun | None = None) -> bool:
        """Evict the least recently used cache except that of ``kept``, and return whether there was any."""
        for run in self.idle_caches:
            if run is not kept:
                self.free_tokens += self.idle_caches.pop(run)
                # A session that is over has released its prompt.
                if run.state is not State.OVER:
                    self.release_prompt(run)
                return True
        return False

    # --- the batch ------------------------------------------------------------

    def generated_tokens(self, run: SessionRun) -> int:
        if run.state is State.RUNNING:
            return run.tokens + int(self.step - run.admitted_at_step)
        return run.tokens

    def length_so_far(self, run: SessionRun) -> int:
        """Return tokens or units of time."""
        if self.by_seconds:
            return int(self.now * UNITS_PER_SECOND * (1 + TOLERANCE))
        return self.generated_tokens(run)

    def remove_from_batch(self, run: SessionRun, state: State) -> None:
        """The sequence's cache stays until the space is needed."""
        generated = self.generated_tokens(run) - run.tokens
        run.tokens += generated
        run.context += generated
        run.computed = run.context
        run.state = state
        self.context_tokens -= run.context
        del self.running[run]
        self.idle_caches[run] = self.own_cache_tokens(run)

    def end_session(self, run: SessionRun) -> None:
        if run.state is State.RUNNING:
            self.remove_from_batch(run, State.OVER)
        elif run.state is State.WAITING:
            self.waiting.remove(run)
        else:
            run.tool_seconds += self.now - run.tool_began_at
        run.state = State.OVER
        # A session without a cache does not hold the prompt.
        if run in self.idle_caches:
            self.release_prompt(run)

    def schedule(self) -> list[SessionRun]:
        """Preempt and admit sequences, and return the admitted sequences."""
        while self.free_tokens < 0 and (self.idle_caches or len(self.running) > 1):
            if not self.idle_caches:
                # Preempt the sequence that was admitted last, and evict its cache.
                last = next(reversed(self.running))
                self.remove_from_batch(last, State.WAITING)
                self.waiting.appendleft(last)
            self.evict_oldest_cache()

        admitted = []
        while self.waiting and len(self.running) < self.machine.max_num_seqs:
            run = self.waiting[0]
            cached_tokens = self.idle_caches.get(run, 0.0)
            needed_tokens = self.own_cache_tokens(run) - cached_tokens
            if not self.prompt_holders[run.group]:
                needed_tokens += self.shared_cache_tokens(run)
            if needed_tokens > self.free_tokens:
                # Caches are evicted only if that suffices. A sequence that is too large for the KV cache runs alone.
                evictable_tokens = sum(self.idle_caches.values()) - cached_tokens
                if self.running and needed_tokens > self.free_tokens + evictable_tokens:
                    break
                if self.evict_oldest_cache(kept=run):
                    continue
            self.waiting.popleft()

            # A sequence with a cache prefills what its tool has added. Others share the prompt of their group.
            new_tokens = run.context - run.computed
            prefilled_tokens = new_tokens
            if self.idle_caches.pop(run, None) is None:
                prefilled_tokens = run.context
                if self.prompt_holders[run.group]:
                    prefilled_tokens -= self.shared_cache_tokens(run)
                self.prompt_holders[run.group] += 1
            run.recomputed += max(0, prefilled_tokens - new_tokens)
            run.state = State.RUNNING
            run.admitted_at_step = self.step
            self.free_tokens -= needed_tokens
            self.context_tokens += run.context
            times = self.machine.step_time
            self.extra_seconds += times.per_prefill_token * prefilled_tokens + times.per_start
            self.running[run] = None
            admitted.append(run)
        return admitted

    # --- the clock --------------------------------------------------------------

    def seconds_of_steps(self, steps: float) -> float:
        """Return the seconds of the next ``steps`` steps: an arithmetic series, because contexts grow."""
        times = self.machine.step_time
        first = times.decode.step_seconds(len(self.running)) + times.per_context_token * self.context_tokens
        increase = times.per_context_token * len(self.running)
        return self.extra_seconds + first * steps + increase * steps * (steps - 1) / 2

    def plan_until_next_event(self) -> None:
        alarm = self.alarms[0][0]
        num_running = len(self.running)
        if not num_running:
            self.planned = (0.0, max(alarm, self.now))
            return
        steps = min(run.next_event_step for run in self.running) - self.step
        if self.free_tokens < inf and (self.idle_caches or num_running > 1):
            # After so many steps the KV cache is too small, and `schedule` evicts a cache or preempts a sequence.
            steps = min(steps, self.free_tokens // num_running + 1)
        if alarm < self.now + self.seconds_of_steps(steps):
            # Run to the first step that ends after the alarm.
            seconds = alarm * (1 - TOLERANCE) - self.now
            steps = 1.0 + bisect_left(range(1, int(steps)), seconds, key=self.seconds_of_steps)
        self.planned = (steps, self.now + self.seconds_of_steps(steps))

    def run_planned_steps(self) -> None:
        steps, self.now = self.planned
        self.step += steps
        self.context_tokens += steps * len(self.running)
        self.free_tokens -= steps * len(self.running)
        self.extra_seconds = 0.0


# --- the rollout --------------------------------------------------------------------


class SessionRollout:
    """Submits all sessions at once, and waits for the needed groups.

    Args:
        sessions: sessions of each new prompt, at least as many as its candidates.
        rngs: generator of tail draws of each new group.
        plan: carried groups come first.
        by_seconds: whether lengths and the deadline count units of 1 / `UNITS_PER_SECOND` seconds since the rollout
            began, instead of generated tokens.
        carried: groups that `remove` has taken out of an earlier rollout. Their rule has no deadline and counts tokens.
    """

    def __init__(
        self,
        sessions: Sequence[Sequence[Session]],
        rngs: Sequence[UniformGenerator],
        plan: BatchPlan,
        machine: Machine,
        by_seconds: bool = False,
        carried: Sequence[SessionGroup] = (),
    ) -> None:
        self.seconds = 0.0
        """Seconds until the needed groups are complete."""
        self.groups = list(carried)
        self.completed: list[int] = []
        """Groups in the order of completion. More than the needed groups may complete in the last step."""
        self.completion_lengths: list[int] = []
        """Completion lengths in the order of completion, for `RecentCompletionLengths`."""
        self.deadline = plan.deadline
        self.cohort = CohortDeadline(plan.deadline, len(plan.candidates))
        self.needed_groups = plan.needed_groups or len(plan.candidates)
        cache_tokens = (machine.kv_blocks or inf) * machine.block_size
        self.engines = [_Engine(machine, by_seconds, cache_tokens) for _ in range(machine.replicas)]
        engine_of_group = [self.engines[engine] for engine in place_groups(plan.candidates, machine.replicas).tolist()]
        for number, count in enumerate(plan.candidates[len(carried) :], start=len(carried)):
            rule = plan.rule(number)
            group = Group(rng=rngs[number - len(carried)], max_replacements=0)
            group.open(rule, count)
            group.handle(*map(Started, range(count)))
            sessions_of_group = sessions[number - len(carried)][:count]
            runs = [
                SessionRun(session, number, index, session.turns[0].added)
                for index, session in enumerate(sessions_of_group)
            ]
            needed_place = place_of_need(rule.completion_place, count, plan.mean_candidates)
            self.groups.append(
                SessionGroup(
                    group,
                    runs,
                    engine_of_group[number],
                    place_of_need=needed_place,
                )
            )
        # Carried groups may have another number and another engine than in their earlier rollout.
        for number, member in enumerate(self.groups):
            member.engine = engine_of_group[number]
            if member.group.outcome is not None:
                self.completed.append(number)
            for run in member.runs:
                run.group = number
                if run.state is State.WAITING:
                    member.engine.waiting.append(run)

    @property
    def is_over(self) -> bool:
        return len(self.completed) >= self.needed_groups

    def run(self) -> None:
        """Run until the needed groups are complete. Other groups end the current step of their engine."""
        for engine in self.engines:
            self._schedule(engine, set())
        while not self.is_over:
            engine = min(self.engines, key=lambda each: each.planned[1])
            engine.run_planned_steps()
            due_groups = self._move_sessions(engine)
            changed_groups = set(due_groups)
            # Groups decide in their order, until their decisions cause no more events.
            while due_groups and not self.is_over:
                number = min(due_groups)
                deadline_before = (self.cohort.tokens, self.cohort.pending_cut_length)
                if not self._update_group(number):
                    due_groups.remove(number)
                if deadline_before != (self.cohort.tokens, self.cohort.pending_cut_length):
                    # All engines learn about the deadline or the limit after their current step.
                    for other, member in enumerate(self.groups):
                        if member.engine is engine:
                            due_groups.add(other)
                        else:
                            heappush(member.engine.alarms, (engine.now, other, NO_SESSION))
                            member.engine.plan_until_next_event()
                    changed_groups |= due_groups
            self.seconds = engine.now
            if not self.is_over:
                self._schedule(engine, changed_groups)

        # Groups that are not complete run to the end of the step in which the rollout ends.
        incomplete = [number for number, member in enumerate(self.groups) if member.group.outcome is None]
        for engine in {self.groups[number].engine for number in incomplete}:
            if engine.now < self.seconds * (1 - TOLERANCE):
                # The engine stops at the alarm. Its group does not matter.
                heappush(engine.alarms, (self.seconds, 0, NO_SESSION))
                engine.plan_until_next_event()
                engine.run_planned_steps()
        for number in incomplete:
            self._update_group(number)

    def remove(self, member: SessionGroup, resumes: bool) -> None:
        """Take a group off its engine, without KV caches. ``resumes``: whether it continues in another rollout."""
        for run in member.runs:
            if run.state is State.OVER:
                continue
            if not resumes:
                member.engine.end_session(run)
                continue
            if run.state is State.RUNNING:
                member.engine.remove_from_batch(run, State.WAITING)
            # The tool ends before the next rollout begins.
            if run.tokens == run.turn_end:
                run.return_from_tool()

    def _move_sessions(self, engine: _Engine) -> set[int]:
        """Return the groups with events."""
        due_groups = set()
        for run in [run for run in engine.running if run.next_event_step <= engine.step]:
            due_groups.add(run.group)
            if engine.generated_tokens(run) == run.turn_end < run.session.tokens:
                engine.remove_from_batch(run, State.IN_TOOL)
                run.tool_began_at = engine.now
                returns_at = engine.now + run.session.turns[run.turns].tool_seconds
                heappush(engine.alarms, (returns_at, run.group, run.index))

        while engine.alarms[0][0] * (1 - TOLERANCE) <= engine.now:
            _, number, index = heappop(engine.alarms)
            due_groups.add(number)
            run = self.groups[number].runs[index]
            # A session that was stopped in its tool does not return.
            if index != NO_SESSION and run.state is State.IN_TOOL:
                run.return_from_tool()
                engine.waiting.append(run)
        return due_groups

    def _update_group(self, number: int) -> bool:
        """Return whether the group's sessions had events."""
        member = self.groups[number]
        group = member.group
        engine = member.engine
        if group.outcome is not None:
            return False
        events: list[Event] = []
        check_lengths = group.check_at
        for run in member.runs:
            length = engine.length_so_far(run)
            if run.state is State.RUNNING and engine.generated_tokens(run) == run.session.tokens:
                reason = FinishReason.STOP if run.session.valid else FinishReason.LENGTH
                events.append(Finished(run.index, length, reason))
                engine.end_session(run)
            elif run.state is not State.OVER and length >= check_lengths.get(run.index, inf):
                events.append(Progress(run.index, length))
        deadline_tokens = self.cohort.tokens
        if self.deadline is not None and deadline_tokens is not None and group.deadline is None:
            events.append(DeadlineSet(deadline_tokens, self.deadline.cut_length_of(deadline_tokens)))
        decisions = group.handle(*events)

        # Report to the cohort the length that the group needs. Until then, report the least length that it can need, if
        # the cohort waits for groups that may need more than its cut length.
        if member.needed_length is None:
            member.needed_length = group.selector.nth_shortest_length(member.place_of_need)
            if member.needed_length is not None:
                self.cohort.report_need(number, member.needed_length)
            elif self.cohort.pending_cut_length is not None:
                lengths = {run.index: engine.length_so_far(run) for run in member.runs}
                minimum = group.selector.min_nth_shortest_length(member.place_of_need, lengths)
                self.cohort.report_minimum(number, minimum)

        for decision in decisions:
            match decision:
                case Stop(index=index) | Cut(index=index) if member.runs[index].state is not State.OVER:
                    engine.end_session(member.runs[index])
                case Complete():
                    self.completed.append(number)
                    self.cohort.remove(number)
                    # 0 stands for a group that was cut before its need was known. A group without a cut adds no length.
                    if member.needed_length is not None or any(candidate.cut for candidate in group.candidates):
                        self.completion_lengths.append(member.needed_length or 0)
        return bool(events)

    def _schedule(self, engine: _Engine, changed_groups: set[int]) -> None:
        changed_groups.update(run.group for run in engine.schedule())
        for number in changed_groups:
            member = self.groups[number]
            check_lengths = member.group.check_at
            limit = inf
            # A group reports to the cohort when it needs more than the limit.
            if self.cohort.pending_cut_length is not None and member.needed_length is None:
                limit = self.cohort.pending_cut_length
            for run in member.runs:
                length = engine.length_so_far(run)
                report_lengths = [each for each in (check_lengths.get(run.index, inf), limit) if each > length]
                if engine.by_seconds:
                    # The length of a session is the time since the rollout began, even while the session waits.
                    for length_in_units in report_lengths:
                        heappush(engine.alarms, (length_in_units / UNITS_PER_SECOND, number, NO_SESSION))
                    report_lengths = []
                tokens_at_next_event = min([run.turn_end, *report_lengths])
                # This is read only while the session runs.
                run.next_event_step = run.admitted_at_step + tokens_at_next_event - run.tokens
        engine.plan_until_next_event()
