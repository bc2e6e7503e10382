"""Small random worlds, and a simulation of them token by token, as the oracle."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator, default_rng

from darts_server.estimates.latency import LatencyCurve
from darts_server.group.events import Complete, Cut, DeadlineSet, Event, Finished, Progress, Started, Stop
from darts_server.group.group import Group
from darts_server.offline.simulation.model.batch import Batch, BatchPlan
from darts_server.offline.simulation.model.engines import Machine, StepTime
from darts_server.policy.deadline import CohortDeadline, Deadline, place_of_need
from darts_server.policy.shaping import Shaping, Tail, build_policies
from darts_server.types import FinishReason
from tests.group.world import Draws

NAMED = build_policies(Shaping(), Deadline(exploration=0.0))
POLICIES: dict[str, Shaping | None] = {
    "off": None,
    "longest": Shaping(tail=Tail.LONGEST),
    "none": Shaping(num_longest=0),
    **{name: NAMED[name] for name in ("uniform", "darts", "darts_cut", "cap")},
    **{
        f"recent_{name}": replace(NAMED[name], deadline=Deadline(exploration=0.0, recent=8))
        for name in ("darts_cut", "cap")
    },
}
RECENT = tuple(name for name in POLICIES if name.startswith("recent_"))
"""Policies with the deadline of earlier groups. In their worlds a random share of the candidates runs to the limit."""
FEW = ("off", "cap", "recent_cap")
"""Policies that start no more candidates than they return."""


@dataclass
class World:
    batch: Batch
    plan: BatchPlan
    machine: Machine


def world(policy: str, seed: int, *, replicas: int = 0, room: int | None = None, groups: int = 0) -> World:
    """Draw a random world. ``room``: sequences that an engine runs at once, without a limit of the KV cache."""
    rng = default_rng([seed, len(policy)])
    groups = groups or int(rng.integers(1, 14))
    size = int(rng.integers(2, 5))
    longest = int(rng.integers(20, 90))
    shaping = POLICIES[policy]
    most = size if shaping is None else max(shaping.candidate_limits(size)[1], shaping.candidates(size))
    least = size if shaping is None or policy in FEW else size + int(rng.integers(0, 2))
    counts = [int(c) for c in rng.integers(least, most + 1, groups)]
    if policy in FEW:
        counts = [size] * groups
    means = rng.uniform(0.1, 1.0, groups) * longest
    lengths = np.ceil(means[:, None] * rng.lognormal(0, 0.6, (groups, max(counts)))).astype(np.int64)
    prompts = rng.integers(1, 40, groups)
    saturated = [shaping is not None and shaping.is_saturated(size, c) for c in counts]
    limit = int(longest * rng.uniform(0.6, 3))
    if policy in RECENT:
        limit *= 4
        runs_away = rng.random((groups, 1)) < rng.uniform(0, 1)
        lengths[runs_away & (rng.random(lengths.shape) < rng.uniform(0.3, 1))] = limit
    return World(
        Batch(prompts, lengths, rng.random(lengths.shape), limit),
        BatchPlan(size, counts, shaping, saturated, None if rng.random() < 0.7 else int(rng.integers(1, groups + 1))),
        machine(rng, replicas or int(rng.integers(1, 4)), room, limit + 40),
    )


def machine(rng: Generator, replicas: int, room: int | None, longest: int) -> Machine:
    curve = LatencyCurve((1.0, 8.0, 32.0), tuple(np.cumsum(rng.uniform(0.5, 1.5, 3)).tolist()), 0.03)
    times = StepTime(curve, float(rng.uniform(0, 0.01)), float(rng.uniform(0, 0.02)), float(rng.uniform(0, 0.5)))
    size = int(rng.choice([1, 4, 16]))
    least = -(-longest // size) + 1
    blocks = None if room is not None or rng.random() < 0.3 else int(least * rng.uniform(1, 6))
    return Machine(times, replicas, int(rng.integers(1, 30)) if room is None else room, blocks, size)


# --- token by token -----------------------------------------------------------


@dataclass
class Candidate:
    group: int
    index: int
    prompt: int
    end: int
    valid: bool
    tokens: int = 0
    over: bool = False


@dataclass
class Engine:
    machine: Machine
    now: float = 0.0
    running: list[Candidate] = field(default_factory=list)
    waiting: list[Candidate] = field(default_factory=list)
    prefill: int = 0
    admitted: int = 0
    preemptions: int = 0

    def blocks(self) -> int:
        size = self.machine.block_size
        shared = sum(prompt // size for prompt in {c.group: c.prompt for c in self.running}.values())
        return shared + sum(-(-(c.prompt + c.tokens) // size) - c.prompt // size for c in self.running)

    def schedule(self) -> None:
        blocks = self.machine.kv_blocks
        size = self.machine.block_size
        while blocks is not None and self.blocks() > blocks:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        while self.waiting and len(self.running) < self.machine.max_num_seqs:
            first = self.waiting[0]
            has_prompt = any(c.group == first.group for c in self.running)
            self.running.append(first)
            if blocks is not None and self.blocks() > blocks:
                self.running.pop()
                return
            self.waiting.pop(0)
            self.prefill += first.tokens + (first.prompt % size if has_prompt else first.prompt)
            self.admitted += 1

    def step_seconds(self) -> float:
        times = self.machine.step_time
        context = sum(c.prompt + c.tokens for c in self.running)
        decode = times.decode.step_seconds(len(self.running))
        first = times.per_prefill_token * self.prefill + times.per_start * self.admitted
        return decode + times.per_context_token * context + first

    def remove(self, candidate: Candidate) -> None:
        candidate.over = True
        (self.running if candidate in self.running else self.waiting).remove(candidate)


@dataclass
class Member:
    number: int
    engine: Engine
    group: Group
    place: int
    candidates: list[Candidate]
    message: DeadlineSet | None = None
    message_at: float = 0.0
    need: int | None = None
    beyond: int | None = None


@dataclass
class Outcome:
    seconds: float
    generated: list[list[int]]
    returned: list[tuple[int, int, int, bool]]
    """Group, index, tokens, and whether truncated."""
    completed: list[float]
    deadline: int | None
    completion_lengths: list[int]
    preemptions: int


def token_by_token(world: World) -> Outcome:
    batch = world.batch
    plan = world.plan
    engines = [Engine(world.machine) for _ in range(world.machine.replicas)]
    load = [0] * len(engines)
    members = []
    for number, count in enumerate(plan.candidates):
        replica = min(range(len(engines)), key=lambda r: (load[r], r))
        load[replica] += count
        candidates = [
            Candidate(
                number,
                i,
                int(batch.prompt_tokens[number]),
                int(min(batch.lengths[number, i], batch.max_tokens)),
                bool(batch.lengths[number, i] < batch.max_tokens),
            )
            for i in range(count)
        ]
        rule = plan.rule(number)
        group = Group(rng=Draws(*batch.tail_draws[number].tolist()), max_replacements=0)
        group.open(rule, count)
        group.handle(*(Started(i) for i in range(count)))
        engines[replica].waiting += candidates
        place = place_of_need(rule.completion_place, count, plan.mean_candidates)
        members.append(Member(number, engines[replica], group, place, candidates))
    rule_of_deadline = plan.deadline
    cohort = CohortDeadline(rule_of_deadline, batch.groups)
    completed: dict[int, float] = {}
    missing = plan.needed_groups or batch.groups
    limit_at = [0.0] * len(engines)
    limit_seen: list[int | None] = [None] * len(engines)

    def events(member: Member) -> list[Event]:
        found: list[Event] = []
        checks = member.group.check_at
        for c in member.candidates:
            if c.over:
                continue
            if c in member.engine.running and c.tokens == c.end:
                found.append(Finished(c.index, c.end, FinishReason.STOP if c.valid else FinishReason.LENGTH))
            elif c.index in checks and c.tokens >= checks[c.index]:
                found.append(Progress(c.index, c.tokens))
        if member.message is not None and member.engine.now >= member.message_at * (1 - 1e-9):
            found.append(member.message)
        return found

    def minimum(member: Member) -> int | None:
        return member.group.selector.min_nth_shortest_length(
            member.place, {c.index: c.tokens for c in member.candidates}
        )

    def is_beyond(member: Member, replica: int) -> bool:
        limit = limit_seen[replica]
        if limit is None or limit != cohort.pending_cut_length or member.need is not None or member.beyond == limit:
            return False
        least = minimum(member)
        return least is None or least > limit

    def update(member: Member, replica: int) -> None:
        nonlocal missing
        before = cohort.tokens, cohort.pending_cut_length
        happened = events(member)
        if any(isinstance(event, DeadlineSet) for event in happened):
            member.message = None
        for event in happened:
            if isinstance(event, Finished):
                member.engine.remove(member.candidates[event.index])
        decisions = member.group.handle(*happened)
        need = member.group.selector.nth_shortest_length(member.place)
        if rule_of_deadline is not None and member.need is None:
            if need is not None:
                member.need = need
                cohort.report_need(member.number, need)
            elif is_beyond(member, replica):
                member.beyond = cohort.pending_cut_length
                cohort.report_minimum(member.number, minimum(member))
        for decision in decisions:
            match decision:
                case Stop(index=index) | Cut(index=index):
                    if not member.candidates[index].over:
                        member.engine.remove(member.candidates[index])
                case Complete():
                    completed[member.number] = member.engine.now
                    missing -= 1
                    cohort.remove(member.number)
        if cohort.tokens is not None and before[0] is None:
            assert rule_of_deadline is not None
            for other in members:
                if other.number not in completed:
                    other.message = DeadlineSet(cohort.tokens, rule_of_deadline.cut_length_of(cohort.tokens))
                    other.message_at = member.engine.now
        if cohort.pending_cut_length != before[1]:
            limit_at[:] = [member.engine.now] * len(engines)
            limit_seen[replica] = cohort.pending_cut_length

    for engine in engines:
        engine.schedule()
    while True:
        ends = [e.now + e.step_seconds() if e.running else np.inf for e in engines]
        replica = int(np.argmin(ends))
        engine = engines[replica]
        engine.now = ends[replica]
        engine.prefill = engine.admitted = 0
        for c in engine.running:
            c.tokens += 1
        if limit_seen[replica] != cohort.pending_cut_length and engine.now >= limit_at[replica] * (1 - 1e-9):
            limit_seen[replica] = cohort.pending_cut_length
        while True:
            due = [
                m
                for m in members
                if m.engine is engine and m.number not in completed and (events(m) or is_beyond(m, replica))
            ]
            if due and missing:
                update(due[0], replica)
                continue
            if not missing:
                break
            before = len(engine.running), len(engine.waiting)
            engine.schedule()
            if before == (len(engine.running), len(engine.waiting)):
                break
        if not missing:
            break
    seconds = engine.now
    for other in engines:
        while other.running and other.now < seconds * (1 - 1e-9):
            other.now += other.step_seconds()
            other.prefill = other.admitted = 0
            for c in other.running:
                c.tokens += 1
    complete = sorted((m for m in members if m.number in completed), key=lambda m: completed[m.number])
    return Outcome(
        seconds,
        [[c.tokens for c in m.candidates] for m in members],
        [
            (m.number, c.index, c.tokens, not c.is_valid)
            for m in members
            for c in m.group.candidates
            if c.selected_as is not None
        ],
        [completed.get(m.number, np.inf) for m in members],
        cohort.tokens,
        [m.need or 0 for m in complete if m.need is not None or any(c.cut for c in m.group.candidates)],
        sum(engine.preemptions for engine in engines),
    )
