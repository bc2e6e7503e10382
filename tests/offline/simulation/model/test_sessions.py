"""The simulated rollout of sessions: against simulations token by token, and figures computed by hand."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.random import default_rng

from darts_server.estimates.latency import LatencyCurve
from darts_server.group.events import Cut, Event, Finished, Progress, Started, Stop
from darts_server.group.group import Group
from darts_server.offline.simulation.model.batch import Batch, BatchPlan
from darts_server.offline.simulation.model.engines import Machine, StepTime
from darts_server.offline.simulation.model.rollout import simulate
from darts_server.offline.simulation.model.sessions import Session, SessionGroup, SessionRollout, State, Turn
from darts_server.policy.deadline import Deadline, RecentCompletionLengths
from darts_server.policy.shaping import Shaping
from darts_server.types import FinishReason, Outcome
from tests.group.world import Draws
from tests.offline.simulation.model.worlds import NAMED, POLICIES, World, machine, token_by_token, world

SECOND = StepTime(LatencyCurve((1.0,), (1.0,)))
PREFILL = replace(SECOND, per_prefill_token=0.5)
FIRST = Shaping(num_longest=0)


def session(*turns: tuple[int, int] | tuple[int, int, float]) -> Session:
    return Session(tuple(Turn(*turn) for turn in turns))


def roll_out(
    groups: Sequence[Sequence[Session]],
    plan: BatchPlan,
    engines: Machine,
    *,
    draws: Sequence[Sequence[float]] | None = None,
    by_seconds: bool = False,
    carried: Sequence[SessionGroup] = (),
) -> SessionRollout:
    rngs = [Draws(*row) for row in draws or [[]] * len(groups)]
    rollout = SessionRollout(groups, rngs, plan, engines, by_seconds, carried)
    rollout.run()
    return rollout


def returned(rollout: SessionRollout) -> list[tuple[int, int, int]]:
    """Return the group, the index and the tokens of each returned session."""
    return [
        (number, run.index, min(run.tokens, candidate.tokens))
        for number, member in enumerate(rollout.groups)
        for run, candidate in zip(member.runs, member.group.candidates, strict=True)
        if candidate.selected_as is not None
    ]


def generated(rollout: SessionRollout) -> list[list[int]]:
    return [[run.tokens for run in member.runs] for member in rollout.groups]


def assert_books_are_balanced(rollout: SessionRollout, completed: Collection[int] | None = None) -> None:
    """Every session is over, in one place, and no token of a KV cache is lost. ``completed``: None for all groups."""
    for number, member in enumerate(rollout.groups):
        if completed is not None and number not in completed:
            assert {run.state for run in member.runs} == {State.OVER}
            continue
        assert member.group.outcome is Outcome.COMPLETED
        assert sum(c.selected_as is not None for c in member.group.candidates) == member.group.rule.size
        for run, candidate in zip(member.runs, member.group.candidates, strict=True):
            assert run.state is State.OVER
            assert (candidate.selected_as is None) != (candidate.reason is None)
            turns = run.session.turns[: run.turns]
            assert sum(turn.generated for turn in turns[:-1]) <= run.tokens <= sum(turn.generated for turn in turns)
            assert run.context == run.tokens + sum(turn.added for turn in turns)
            whole = sum(turn.tool_seconds for turn in run.session.turns[: run.turns + 1])
            assert sum(turn.tool_seconds for turn in turns) <= run.tool_seconds + 1e-9
            assert run.tool_seconds <= whole * (1 + 1e-9)
            if candidate.selected_as is not None and not candidate.cut:
                assert run.tokens == run.session.tokens
    for engine in rollout.engines:
        assert not engine.running
        assert not engine.waiting
        assert not any(engine.prompt_holders.values())
        blocks = engine.machine.kv_blocks
        if blocks is not None:
            assert engine.free_tokens + sum(engine.idle_caches.values()) == pytest.approx(
                blocks * engine.machine.block_size
            )


# --- sessions of one turn -----------------------------------------------------


def one_turn(batch: Batch) -> list[list[Session]]:
    rows = zip(batch.prompt_tokens.tolist(), batch.capped_lengths.tolist(), batch.valid.tolist(), strict=True)
    return [
        [Session((Turn(prompt, tokens),), valid) for tokens, valid in zip(ends, valids, strict=True)]
        for prompt, ends, valids in rows
    ]


def small_cache(case: World) -> World:
    """Return a world whose KV caches are full, and whose blocks have one token, so that no block is half empty."""
    longest = (case.batch.prompt_tokens[:, None] + case.batch.capped_lengths).max()
    return replace(case, machine=replace(case.machine, block_size=1, kv_blocks=int(longest * 1.5)))


@pytest.mark.untraced
@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_of_one_turn_run_as_candidates_token_by_token_with_any_queue(policy: str, nightly: bool) -> None:
    preemptions = 0
    for seed in range(20 if nightly else 3):
        together = world(policy, seed, replicas=1, room=1000, groups=13)
        queued = world(policy, seed, replicas=2, room=7)
        for case in (together, queued, small_cache(world(policy, seed))):
            case.plan = replace(case.plan, needed_groups=case.batch.groups // 2 + 1 if seed % 2 else None)
            expected = token_by_token(case)
            found = roll_out(one_turn(case.batch), case.plan, case.machine, draws=case.batch.tail_draws.tolist())
            assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
            enough = case.plan.needed_groups or case.batch.groups
            assert np.flatnonzero(np.isfinite(expected.completed)).tolist() == sorted(found.completed[:enough])
            # Other groups may have completed with the step that ends the rollout.
            of_enough = [place for place in returned(found) if place[0] in found.completed[:enough]]
            assert of_enough == [place[:3] for place in expected.returned]
            if case.plan.deadline is not None:
                lengths = found.completion_lengths[: len(expected.completion_lengths)]
                assert sorted(lengths) == sorted(expected.completion_lengths)
            if enough == case.batch.groups and case.plan.deadline is not None:
                assert {member.group.deadline for member in found.groups} <= {expected.deadline, None}
                assert len(found.completion_lengths) == len(expected.completion_lengths)
            for number, member in enumerate(found.groups):
                if number not in found.completed[:enough]:
                    found.remove(member, resumes=False)
            assert generated(found) == expected.generated
            assert_books_are_balanced(found, found.completed[:enough])
            preemptions += expected.preemptions
            assert (sum(run.recomputed for member in found.groups for run in member.runs) > 0) == (
                expected.preemptions > 0
            )
    assert preemptions > 0


@pytest.mark.untraced
@pytest.mark.parametrize("policy", POLICIES)
def test_sessions_of_one_turn_that_start_together_run_as_in_the_model_of_candidates(policy: str) -> None:
    for seed in range(4):
        case = world(policy, seed, replicas=1, room=1000, groups=13)
        plan = replace(case.plan, needed_groups=None)
        expected = simulate(case.batch, plan, case.machine)
        found = roll_out(one_turn(case.batch), plan, case.machine, draws=case.batch.tail_draws.tolist())
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
        assert returned(found) == [
            (group, index, int(expected.returned[group, index]))
            for group, index in np.argwhere(expected.returned > 0).tolist()
        ]


# --- several turns, step by step ------------------------------------------------


@dataclass(eq=False)
class Plain:
    """A session in a simulation that goes step by step and computes everything anew."""

    session: Session
    group: int
    index: int
    turn: int = 0
    tokens: int = 0
    context: int = 0
    computed: int = 0
    recomputed: int = 0
    returns_at: float = np.inf
    over: bool = False

    @property
    def turn_end(self) -> int:
        return sum(turn.generated for turn in self.session.turns[: self.turn + 1])


def step_by_step(case: World, groups: Sequence[Sequence[Session]]) -> tuple[float, list[list[Plain]], list[Group]]:
    """Simulate sessions on one engine with blocks of one token, without a deadline."""
    engines = case.machine
    times = engines.step_time
    space = np.inf if engines.kv_blocks is None else engines.kv_blocks
    members = [
        [Plain(each, g, i, context=each.turns[0].added) for i, each in enumerate(row)] for g, row in enumerate(groups)
    ]
    machines = []
    for number, row in enumerate(members):
        group = Group(rng=Draws(*case.batch.tail_draws[number].tolist()), max_replacements=0)
        group.open(case.plan.rule(number), len(row))
        group.handle(*(Started(i) for i in range(len(row))))
        machines.append(group)
    waiting = [plain for row in members for plain in row]
    running: list[Plain] = []
    cached: list[Plain] = []
    away: list[Plain] = []
    now = 0.0

    def is_over() -> bool:
        return sum(group.outcome is not None for group in machines) >= (case.plan.needed_groups or len(machines))

    def used() -> int:
        holders = {plain.group for plain in running} | {plain.group for plain in cached if not plain.over}
        shared = sum(members[group][0].session.turns[0].added for group in holders)
        own = sum(plain.context - plain.session.turns[0].added for plain in running)
        return shared + own + sum(plain.computed - plain.session.turns[0].added for plain in cached)

    def stop(plain: Plain) -> None:
        plain.over = True
        if plain in running:
            running.remove(plain)
            plain.computed = plain.context
            cached.append(plain)
        for queue in (waiting, away):
            if plain in queue:
                queue.remove(plain)

    while not is_over():
        # Ends of turns, returns from tools, and then the decisions of the groups.
        for plain in list(running):
            if plain.tokens == plain.turn_end < plain.session.tokens:
                running.remove(plain)
                plain.computed = plain.context
                cached.append(plain)
                plain.returns_at = now + plain.session.turns[plain.turn + 1].tool_seconds
                away.append(plain)
        for plain in sorted(away, key=lambda each: each.returns_at):
            if plain.returns_at * (1 - 1e-9) <= now:
                away.remove(plain)
                plain.turn += 1
                plain.context += plain.session.turns[plain.turn].added
                waiting.append(plain)
        for row, group in zip(members, machines, strict=True):
            while not is_over():
                checks = group.check_at
                events: list[Event] = []
                for plain in row:
                    if not plain.over and plain.tokens == plain.session.tokens:
                        reason = FinishReason.STOP if plain.session.valid else FinishReason.LENGTH
                        events.append(Finished(plain.index, plain.tokens, reason))
                        stop(plain)
                    elif not plain.over and plain.index in checks and plain.tokens >= checks[plain.index]:
                        events.append(Progress(plain.index, plain.tokens))
                if not events or group.outcome:
                    break
                for decision in group.handle(*events):
                    if isinstance(decision, Stop | Cut):
                        stop(row[decision.index])

        if is_over():
            break

        # The KV cache, and the queue.
        while used() > space and (cached or len(running) > 1):
            if cached:
                cached.pop(0)
            else:
                last = running.pop()
                last.computed = last.context
                waiting.insert(0, last)
        prefilled = 0
        admitted = 0
        while waiting and len(running) < engines.max_num_seqs:
            first = waiting[0]
            kept = list(cached)
            others = [plain for plain in cached if plain is not first]
            own = first in cached
            holders = {plain.group for plain in running} | {plain.group for plain in cached if not plain.over}
            running.append(first)
            if own:
                cached.remove(first)
            # Caches of others are evicted only if that suffices, without the prompts that they would free.
            evictable = sum(plain.computed - plain.session.turns[0].added for plain in others)
            if used() - evictable > space and len(running) > 1:
                running.pop()
                cached[:] = kept
                break
            while used() > space and cached:
                cached.pop(0)
                holders = {plain.group for plain in running[:-1]} | {plain.group for plain in cached if not plain.over}
            waiting.pop(0)
            work = first.context - first.computed
            if not own:
                work = first.context
                if first.group in holders:
                    work -= first.session.turns[0].added
            first.recomputed += max(0, work - (first.context - first.computed))
            prefilled += work
            admitted += 1

        # A step, or nothing until a session comes back.
        if not running:
            now = min(plain.returns_at for plain in away)
            continue
        context = sum(plain.context for plain in running)
        now += times.decode.step_seconds(len(running)) + times.per_context_token * context
        now += times.per_prefill_token * prefilled + times.per_start * admitted
        for plain in running:
            plain.tokens += 1
            plain.context += 1
    return now, members, machines


@pytest.mark.untraced
@pytest.mark.parametrize("policy", ["off", "uniform", "none", "longest"])
def test_sessions_run_as_step_by_step(policy: str, nightly: bool) -> None:
    recomputed = 0
    stopped = 0
    for seed in range(60 if nightly else 12):
        rng = default_rng(seed)
        case = world(policy, seed, replicas=1, room=1000)
        case.plan = replace(case.plan, needed_groups=case.batch.groups // 2 + 1 if seed % 2 else None)
        # Tools take from no time to some dozens of steps.
        groups = [
            [
                Session(
                    tuple(
                        Turn(prompt if turn == 0 else int(rng.integers(0, 20)), int(rng.integers(1, 15)), float(tool))
                        for turn, tool in enumerate([0.0, *rng.exponential(20, int(rng.integers(0, 4)))])
                    ),
                    bool(rng.random() < 0.9),
                )
                for _ in range(count)
            ]
            for prompt, count in zip(case.batch.prompt_tokens.tolist(), case.plan.candidates, strict=True)
        ]
        longest = max(sum(turn.added + turn.generated for turn in each.turns) for row in groups for each in row)
        blocks = None if seed % 3 == 0 else int(longest * rng.uniform(1.1, 3))
        case.machine = replace(machine(rng, 1, int(rng.integers(2, 30)), 0), kv_blocks=blocks, block_size=1)
        seconds, members, machines = step_by_step(case, groups)
        found = roll_out(groups, case.plan, case.machine, draws=case.batch.tail_draws.tolist())
        enough = found.completed[: found.needed_groups]
        for number, member in enumerate(found.groups):
            if number not in enough:
                found.remove(member, resumes=False)
        assert_books_are_balanced(found, enough)
        assert found.seconds == pytest.approx(seconds, rel=1e-9)
        assert sorted(enough) == [number for number, group in enumerate(machines) if group.outcome is not None]
        assert generated(found) == [[plain.tokens for plain in row] for row in members]
        for member, row, group in zip(found.groups, members, machines, strict=True):
            assert [run.turns for run in member.runs] == [plain.turn + 1 for plain in row]
            assert [run.recomputed for run in member.runs] == [plain.recomputed for plain in row]
            if group.outcome is not None:
                assert [c.selected_as for c in member.group.candidates] == [c.selected_as for c in group.candidates]
            recomputed += sum(run.recomputed for run in member.runs)
            if group.outcome is not None:
                stopped += sum(run.tokens < run.session.tokens for run in member.runs)
    assert recomputed > 0
    assert (stopped > 0) == (policy in ("uniform", "none"))


# --- computed by hand ---------------------------------------------------------


def test_a_tool_takes_its_seconds_and_no_place_in_the_batch() -> None:
    found = roll_out([[session((1, 3), (4, 2, 2.5))]], BatchPlan(1, [1]), Machine(PREFILL))
    # Turn 1 ends after 3 steps and a prefill of 1 token; turn 2 begins 2.5 s later, and prefills 4 tokens.
    assert found.seconds == 3 + 0.5 + 2.5 + 2 + 4 * 0.5
    assert found.groups[0].runs[0].tool_seconds == 2.5
    assert found.groups[0].runs[0].recomputed == 0


def test_a_session_that_comes_back_waits_for_the_end_of_the_step() -> None:
    found = roll_out([[session((1, 3), (0, 2, 2.5))], [session((1, 10))]], BatchPlan(1, [1, 1]), Machine(SECOND))
    assert found.seconds == 10
    found = roll_out([[session((1, 3), (0, 5, 2.5))], [session((1, 6))]], BatchPlan(1, [1, 1]), Machine(SECOND))
    # It is back at 5.5, and runs from 6 to 11.
    assert found.seconds == 11


def test_a_session_that_comes_back_is_the_last_in_the_queue() -> None:
    sessions = [[session((1, 3), (0, 2))], [session((1, 7))], [session((1, 7))]]
    machine = Machine(SECOND, max_num_seqs=1)
    # The tool takes no time, and both others run before the second turn.
    assert roll_out(sessions, BatchPlan(1, [1, 1, 1]), machine).seconds == 3 + 7 + 7 + 2
    sessions[0] = [session((1, 3), (0, 20))]
    assert roll_out(sessions, BatchPlan(1, [1, 1, 1]), machine).seconds == 3 + 7 + 7 + 20


def test_the_least_recently_used_cache_is_evicted_and_computed_again() -> None:
    # The first two sessions go into their tools with 4 and 5 tokens in a KV cache of 16 tokens.
    sessions = [[session((2, 2), (1, 1, 20.0))], [session((2, 3), (1, 1, 5.0))], [session((4, 7))]]
    machine = Machine(PREFILL, kv_blocks=16, block_size=1)
    found = roll_out(sessions, BatchPlan(1, [1, 1, 1]), machine)
    # The first step prefills 8 tokens in 4 s. After step 3 the cache is full, and step 4 needs a token more. The third
    # ends in step 7. The second is back at 4 + 3 + 5, and takes the space of the third, which is over.
    assert [member.runs[0].recomputed for member in found.groups] == [4, 0, 0]
    # The first is back at 4 + 2 + 20, and prefills 5 tokens.
    assert found.seconds == 26 + 5 * 0.5 + 1
    roomy = roll_out(sessions, BatchPlan(1, [1, 1, 1]), replace(machine, kv_blocks=100))
    assert [member.runs[0].recomputed for member in roomy.groups] == [0, 0, 0]
    assert roomy.seconds == 26 + 1 * 0.5 + 1


def test_a_session_that_comes_back_keeps_its_own_cache() -> None:
    # The first session is the least recently used, and needs 6 tokens more than its 4. So the second is evicted.
    sessions = [[session((2, 2), (5, 1, 3.0))], [session((2, 3), (1, 1, 20.0))]]
    found = roll_out(sessions, BatchPlan(1, [1, 1]), Machine(SECOND, kv_blocks=12, block_size=1))
    assert [member.runs[0].recomputed for member in found.groups] == [0, 5]


def test_a_group_keeps_its_prompt_while_a_session_has_a_cache() -> None:
    sessions = [session((10, 2), (1, 1, 5.0)), session((10, 4), (1, 1, 5.0))]
    machine = Machine(PREFILL, block_size=1)
    found = roll_out([sessions], BatchPlan(2, [2]), machine)
    # The prompt is prefilled once, and each tool's token.
    assert found.seconds == (4 + 10 * 0.5) + 5 + (1 + 0.5)


def test_a_session_that_is_too_large_for_the_kv_cache_runs_alone() -> None:
    sessions = [[session((10, 30), (5, 4, 1.0))], [session((1, 20))]]
    found = roll_out(sessions, BatchPlan(1, [1, 1]), Machine(SECOND, kv_blocks=2, block_size=1))
    # The second waits while the first runs, and the first, whose cache is evicted, is then the last in the queue.
    assert found.seconds == 30 + 20 + 4
    assert [member.runs[0].recomputed for member in found.groups] == [40, 0]


def test_the_sequence_that_was_admitted_last_is_preempted_if_no_cache_is_left() -> None:
    # Two prompts of 3 tokens: after 2 steps there are 10 tokens, and the third step makes 12.
    sessions = [[session((3, 6))], [session((3, 6))]]
    found = roll_out(sessions, BatchPlan(1, [1, 1]), Machine(PREFILL, kv_blocks=10, block_size=1))
    assert found.seconds == 3 + 6 + 3 + 3
    assert [member.runs[0].recomputed for member in found.groups] == [0, 6]


def test_a_session_in_the_queue_can_be_stopped() -> None:
    sessions = [session((1, 3)), session((1, 4)), session((1, 2), (1, 9))]
    found = roll_out([sessions], BatchPlan(2, [3], FIRST), Machine(SECOND, max_num_seqs=1), by_seconds=True)
    # The third has its first turn last, and waits for its second.
    assert (found.seconds, generated(found)) == (7, [[3, 4, 0]])
    sessions = [session((1, 1), (1, 9)), session((1, 3)), session((1, 4))]
    found = roll_out([sessions], BatchPlan(2, [3], FIRST), Machine(SECOND, max_num_seqs=1), by_seconds=True)
    assert (found.seconds, generated(found), found.groups[0].runs[0].turns) == (8, [[1, 3, 4]], 2)
    assert_books_are_balanced(found)


def test_a_session_is_stopped_in_its_tool_and_the_rest_of_the_tool_is_saved() -> None:
    slow = session((1, 6), (1, 5, 100.0))
    found = roll_out([[session((1, 4)), session((1, 5)), slow]], BatchPlan(2, [3], FIRST), Machine(SECOND))
    # With 6 tokens the slow session cannot be among the two shortest, and it has not begun its tool.
    assert (found.seconds, generated(found)) == (5, [[4, 5, 5]])
    short = session((1, 2), (1, 5, 100.0))
    found = roll_out([[session((1, 4)), session((1, 9)), short]], BatchPlan(2, [3], FIRST), Machine(SECOND))
    # It waits with 2 tokens, so it may still be among the shortest: the group waits until it has 9.
    assert returned(found) == [(0, 0, 4), (0, 2, 7)]
    run = found.groups[0].runs[2]
    assert (found.seconds, run.tool_seconds, run.turns) == (2 + 100 + 5, 100.0, 2)


def test_the_first_that_finish_by_the_clock_are_not_the_shortest() -> None:
    sessions = [session((1, 4)), session((1, 9)), session((1, 2), (1, 1, 100.0))]
    found = roll_out([sessions], BatchPlan(2, [3], FIRST), Machine(SECOND), by_seconds=True)
    assert returned(found) == [(0, 0, 4), (0, 1, 9)]
    assert found.seconds == 9
    # It was stopped in its tool after 7 of 100 seconds.
    assert (found.groups[0].runs[2].tool_seconds, found.groups[0].runs[2].turns) == (7, 1)


def test_sessions_that_finish_in_the_same_step_are_taken_by_index() -> None:
    sessions = [session((1, 5)), session((1, 4)), session((1, 4))]
    found = roll_out([sessions], BatchPlan(1, [3], FIRST), Machine(SECOND), by_seconds=True)
    assert returned(found) == [(0, 1, 4)]


def test_a_deadline_counts_the_tokens_of_all_turns() -> None:
    short = [session((1, 2), (1, 2, 1.0))] * 3
    long = [*short[:2], session((1, 3), (1, 100, 1.0))]
    found = roll_out([*[short] * 9, long], BatchPlan(3, [3] * 10, NAMED["cap"]), Machine(SECOND))
    assert (found.seconds, returned(found)[-1]) == (5, (9, 2, 4))
    assert found.groups[9].group.candidates[2].cut
    assert found.completion_lengths == [4] * 10


def test_a_session_that_finished_before_the_deadline_was_known_is_cut_to_it() -> None:
    slow = [session((1, 4), (1, 1, 8.0))] * 6
    groups = [[*[session((1, 2))] * 4, session((1, 12)), session((1, 30))], *[slow] * 9]
    found = roll_out(groups, BatchPlan(6, [6] * 10, NAMED["cap"]), Machine(SECOND))
    # The others have their 5 tokens after 13 s.
    assert (found.seconds, generated(found)[0]) == (13, [2, 2, 2, 2, 12, 13])
    assert returned(found)[4:6] == [(0, 4, 5), (0, 5, 5)]


def test_a_deadline_in_seconds_comes_while_a_session_is_in_its_tool() -> None:
    # The other groups are complete after 4 s, and the deadline is 1.5 times as late.
    cap = replace(NAMED["cap"], deadline=Deadline(exploration=0.0, factor=1.5))
    short = [session((1, 4))] * 3
    long = [*short[:2], session((1, 3), (1, 5, 100.0))]
    found = roll_out([*[short] * 9, long], BatchPlan(3, [3] * 10, cap), Machine(SECOND), by_seconds=True)
    run = found.groups[9].runs[2]
    assert found.seconds == pytest.approx(6)
    assert run.tool_seconds == pytest.approx(3)
    assert (run.tokens, run.turns) == (3, 1)


def test_a_plan_has_the_deadline_of_earlier_groups_if_its_policy_has_a_deadline() -> None:
    recent = RecentCompletionLengths([7] * 8)
    plan = BatchPlan(2, [2] * 10, NAMED["cap"]).with_recent(recent)
    assert plan.deadline is not None
    assert plan.deadline.recent == 7
    uniform = BatchPlan(2, [3] * 10, NAMED["uniform"])
    assert uniform.with_recent(recent) is uniform


def test_a_group_without_enough_valid_sessions_has_no_completion_length() -> None:
    found = roll_out([[Session((Turn(1, 4),), valid=False)]], BatchPlan(1, [1]), Machine(SECOND))
    assert found.completion_lengths == []
    assert returned(found) == [(0, 0, 4)]


def test_groups_on_another_engine_learn_the_deadline_after_their_step() -> None:
    # The second engine finds the deadline in step 4, which the first has handled then.
    short = [session((1, 4))] * 3
    groups = [[*short[:2], session((1, 50))], *[short] * 19]
    found = roll_out(groups, BatchPlan(3, [3] * 20, NAMED["cap"]), Machine(SECOND, replicas=2))
    assert (found.seconds, returned(found)[2], found.groups[0].runs[2].tokens) == (5, (0, 2, 4), 5)


def test_a_runaway_is_cut_before_the_other_groups_are_known() -> None:
    """Of 10 groups 2 never need few tokens, so the deadline is known when they are beyond twice the other groups."""
    groups = [*[[session((1, 4))] * 3] * 8, *[[session((1, 60), (1, 40, 3.0))] * 3] * 2]
    found = roll_out(groups, BatchPlan(3, [3] * 10, NAMED["cap"]), Machine(SECOND))
    assert generated(found)[8:] == [[8] * 3] * 2
    assert returned(found)[-1] == (9, 2, 8)
    assert found.completion_lengths == [4] * 8 + [0, 0]


# --- the first groups that are complete ---------------------------------------------


def test_a_rollout_ends_when_enough_groups_are_complete() -> None:
    groups = [[session((1, 9), (1, 1, 4.0))], [session((1, 3))], [session((1, 2), (1, 2, 1.0))]]
    found = roll_out(groups, BatchPlan(1, [1] * 3, needed_groups=2), Machine(SECOND))
    # The third is back at 3, and has its last token at 5.
    assert (found.seconds, found.completed) == (5, [1, 2])
    found.remove(found.groups[0], resumes=False)
    assert generated(found) == [[5], [3], [4]]
    assert_books_are_balanced(found, found.completed)


def test_engines_end_the_step_in_which_enough_groups_are_complete() -> None:
    # Two sessions on the second engine take 1.5 s a step. The first engine has four, whose step takes longer.
    machine = Machine(StepTime(LatencyCurve((1.0, 2.0), (1.0, 1.5))), replicas=2)
    groups = [[session((1, 9))] * 2, [session((1, 2), (1, 3))] * 2, [session((1, 1))] * 2]
    found = roll_out(groups, BatchPlan(2, [2, 2, 2], needed_groups=1), machine)
    seconds = machine.step_time.decode.step_seconds(4)
    assert found.seconds == pytest.approx(seconds)
    assert found.completed == [2]
    for member in found.groups[:2]:
        found.remove(member, resumes=True)
    assert generated(found) == [[1, 1], [-(-seconds // 1.5)] * 2, [1, 1]]


def test_a_group_that_is_left_over_continues_in_the_next_rollout() -> None:
    machine = Machine(PREFILL, block_size=1)
    slow = [session((2, 2), (3, 4, 50.0)), session((2, 9)), session((2, 1))]
    first = roll_out([slow, [session((1, 4))] * 3], BatchPlan(3, [3, 3], needed_groups=1), machine)
    # Both prompts are prefilled once, with 3 tokens.
    assert (first.seconds, first.completed) == (4 + 3 * 0.5, [1])
    member = first.groups[0]
    first.remove(member, resumes=True)
    assert [run.state for run in member.runs] == [State.WAITING, State.WAITING, State.OVER]
    # The tool runs to its end while the trainer trains.
    assert [(run.turns, run.tokens, run.tool_seconds) for run in member.runs] == [(2, 2, 50), (1, 4, 0), (1, 1, 0)]

    second = roll_out([[session((1, 4))] * 3], BatchPlan(3, [3, 3], needed_groups=2), machine, carried=[member])
    # The prompt of 2 tokens, 5 and 4 tokens of the contexts after it, and the new prompt. The last has 5 of 9 to go.
    assert second.seconds == 5 + (2 + 5 + 4 + 1) * 0.5
    assert second.completed == [1, 0]
    assert_books_are_balanced(second)
    assert returned(second)[:3] == [(0, 0, 6), (0, 1, 9), (0, 2, 1)]
    # New weights need new KV caches: 4 tokens, 2 of them of the prompt, and 6 without the prompt.
    assert [run.recomputed for run in member.runs] == [4, 4, 0]


def test_groups_that_complete_in_the_last_step_come_first_in_the_next_rollout() -> None:
    plan = BatchPlan(1, [1, 1], needed_groups=1)
    first = roll_out([[session((1, 4))], [session((1, 4))]], plan, Machine(SECOND))
    assert first.completed == [0, 1]
    first.remove(first.groups[1], resumes=True)
    second = roll_out([[session((1, 4))]], plan, Machine(SECOND), carried=[first.groups[1]])
    assert (second.seconds, second.completed) == (0, [0])
    assert generated(second) == [[4], [0]]


def test_a_turn_that_ends_with_the_rollout_is_followed_by_its_tool() -> None:
    # Both groups end a turn in step 3, and the group that ends the rollout comes first.
    plan = BatchPlan(1, [1, 1], needed_groups=1)
    first = roll_out([[session((1, 3))], [session((1, 3), (1, 2, 7.0))]], plan, Machine(SECOND))
    first.remove(first.groups[1], resumes=True)
    run = first.groups[1].runs[0]
    assert (run.state, run.turns, run.tool_seconds, run.context) == (State.WAITING, 2, 7, 5)
