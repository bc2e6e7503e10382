"""Groups of one server: ends by id, the queue in front of the engine, the gate, and restarts."""

import asyncio
import random
from typing import Any

import pytest

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import Script, settle
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.exceptions import GroupAborted, InvalidRequest, ServerStopping
from darts_server.group.informative import Select
from darts_server.policy.allocation import Brownout
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.learned.statistics import observations
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Admission, AdmissionLimits
from darts_server.types import DiscardReason
from tests.rollout.batches.test_batch import batch_request, script, submit
from tests.rollout.helpers import Harness, lengths
from tests.rollout.joining.joining import by_caller, finish

pytestmark = pytest.mark.anyio


async def test_the_poller_stops_while_no_group_runs_and_restarts_for_the_next_group() -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    for _ in range(2):
        assert len(await harness.group(harness.run(4))) == 4
        await settle()
        assert [t for t in asyncio.all_tasks() if t.get_name() == "darts-poller"] == []


async def test_polls_that_cannot_find_anything_are_skipped() -> None:
    harness = Harness(lambda _, index: Script(300 if index == 2 else 200, delay=150 * (index == 2)), poll=1000)
    waiting = await harness.begin(harness.run(2, "shortest"))
    [run] = harness.rollouts.runs
    skipped = []
    for steps in (202, 40, 40, 40):
        await harness.steps(steps)
        run.poll()
        skipped.append(run.polls_to_skip)
    # The third candidate is stopped when it has as many tokens as the second.
    assert skipped == [3, 2, 1, 0]
    await harness.steps(40)
    run.poll()
    assert len(await waiting) == 2
    assert harness.engine.started[2].stopped


async def test_the_end_of_a_candidate_stops_its_longer_siblings_without_waiting_for_the_poller() -> None:
    """The poller's timer would let them generate meanwhile."""
    stopped = []
    for poll in (0, 1000):
        harness = Harness(lengths(3, 9, 4, 30, 5, 50), poll=poll)
        runs = [harness.run(4, "uniform", group_id=f"g{seed}", tail_seed=seed) for seed in range(8)]
        waiting = [await harness.begin(run) for run in runs]
        await harness.engine.run()
        await asyncio.gather(*waiting)
        stopped.append([[c.tokens for c in harness.record(f"g{seed}").candidates] for seed in range(8)])
    assert stopped[0] == stopped[1]
    assert any(30 not in tokens for tokens in stopped[0]), "candidates were stopped before their end"


async def test_a_group_that_cannot_be_opened_leaves_nothing_behind() -> None:
    harness = Harness(lengths(3, 4))
    plan = harness.plan(4, "uniform")
    with pytest.raises(ValueError, match="at least the group size"):
        harness.rollouts.start(GroupSpec(plan, "g", "g", "g"), Allocation(3))
    assert not harness.rollouts.runs
    assert harness.rollouts.gate.work_inside == 0
    assert harness.rollouts.admission.waiting == 0
    assert harness.record("g").candidates == ()


async def test_the_pass_rate_of_a_group_counts_rewards_from_before_its_start() -> None:
    """So it is a baseline that does not depend on the group, and keeps a gradient exact."""
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    right, wrong = RewardStats(right=single_length(5, 3.0)), RewardStats(wrong=single_length(9, 1.0))
    rates = []
    earlier: list[dict[str | None, RewardStats]] = [{}, {"p": right + wrong}, {"other": wrong}]
    for reported in earlier:
        harness.rollouts.statistics.rewards.learn(reported)
        run = harness.run(4, group_id="p")
        waiting = await harness.begin(run)
        harness.rollouts.statistics.rewards.learn({"p": wrong})  # of what was returned early, or of another group
        await harness.engine.run()
        await waiting
        assert run.record is not None
        rates.append(run.record.earlier_pass_rate)
    assert rates == [None, 3 / 5, 3 / 6]
    unnamed = harness.collect("no key", "uniform")
    unnamed.cancel()
    assert unnamed.record is not None
    assert unnamed.record.earlier_pass_rate is None


@pytest.mark.parametrize("end", ["abort", "abort_all", "fail_all"])
async def test_all_groups_with_the_same_id_are_stopped(end: str) -> None:
    """Callers choose ids: two concurrent requests with the same X-Request-Id."""
    harness = Harness(lengths(9))
    waiting = [await harness.begin(harness.run(2), steps=1) for _ in range(2)]
    if end == "fail_all":
        harness.rollouts.fail_all(ServerStopping("stops", 1))
    else:
        getattr(harness.rollouts, end)("g")
    await settle()
    assert (len(harness.rollouts.runs), harness.engine.running) == (0, [])
    for task in waiting:
        with pytest.raises((GroupAborted, ServerStopping)):
            await task


async def test_redundancy_falls_as_the_queue_grows_and_recovers_when_it_is_empty() -> None:
    harness = Harness(lengths(5), {"uniform": Shaping(redundancy=2.0, num_longest=0)})
    harness.rollouts.admission = Admission(
        lambda: harness.engine.unfinished_requests, 4, AdmissionLimits(max_waiting=16)
    )
    harness.rollouts._brownout = Brownout(4, 16)
    runs, candidates = [], []
    for number in range(5):
        plan = harness.plan(4, "uniform")
        grant = await harness.rollouts.allocator.allocate(plan, "p")
        runs.append(harness.rollouts.start(GroupSpec(plan, "p", str(number)), grant))
        await settle()
        candidates.append(grant.candidates)
    # Waiting before each: 0, 4, 12, 17, 21; the scale falls from 1 at 4 to 0 at 16.
    assert candidates == [8, 8, 5, 4, 4]
    assert harness.rollouts.redundancy_scale() == 0
    for run in runs:
        run.cancel()
    await settle()
    assert harness.rollouts.redundancy_scale() == 1


async def test_redundancy_rises_later_than_it_falls_and_reading_it_changes_nothing() -> None:
    harness = Harness(lengths(5))
    waiting = 0
    harness.rollouts.admission = Admission(lambda: waiting, 0, AdmissionLimits(max_waiting=100))
    harness.rollouts._brownout = Brownout(20, 100)
    run = harness.run(2)
    waiting = 100
    assert harness.rollouts.redundancy_scale() == 0
    waiting = 20
    assert harness.rollouts.redundancy_scale() == 1, "no poll has seen the longer queue"
    waiting = 100
    await settle()
    waiting = 20
    assert harness.rollouts.redundancy_scale() == pytest.approx(70 / 80)
    waiting = 10
    run.cancel()
    await settle()
    waiting = 20
    assert harness.rollouts.redundancy_scale() == 1, "the last poll has seen the shorter queue"


async def test_a_batch_that_needs_more_candidates_than_a_key_may_have_is_refused() -> None:
    harness = Harness(script)
    harness.rollouts.admission = Admission(lambda: 0, None, AdmissionLimits(max_per_caller=18))
    token = caller.set(Caller("one"))
    with pytest.raises(InvalidRequest, match="a key may have") as error:
        await submit(harness, batch_request("20", "30", "40", "50"))  # six for each group
    assert error.value.field == "prompts"
    caller.reset(token)


# --- the gate: running groups are inside, new ones wait while it is closed -----------


async def test_a_group_is_inside_the_gate_until_it_has_ended_with_any_outcome() -> None:
    harness = Harness(lengths(3, 4, 5, 6))
    run = harness.run(2)
    assert harness.rollouts.gate.work_inside == 1
    await harness.group(run)
    assert harness.rollouts.gate.work_inside == 0
    for end in ("cancel", "abort"):
        run = harness.run(2, group_id=end)
        await settle()
        assert harness.rollouts.gate.work_inside == 1
        getattr(run, end)()
        assert harness.rollouts.gate.work_inside == 0


async def test_a_batch_that_is_cancelled_while_waiting_for_the_gate_starts_nothing() -> None:
    harness = Harness(script)
    harness.rollouts.gate.close()
    batch = await submit(harness, batch_request("20", "30"), "cut")
    await settle()
    assert batch.cancel("too late")
    await settle()
    assert harness.engine.started == []
    assert harness.rollouts.gate.work_inside == 0


async def test_a_joined_group_expects_its_missing_requests() -> None:
    harness = by_caller(3, 4)
    has_open_group = harness.rollouts.joiner.has_open_group
    callers = await harness.send_all(3)
    [key] = harness.rollouts.joiner.groups
    assert (has_open_group(key), has_open_group("another")) == (True, False)
    callers += await harness.send_all(1)
    assert not has_open_group(key)
    await finish(harness, callers)
    assert harness.rollouts.gate.work_inside == 0


# --- groups that are suspended and restarted for an update of the weights ------------


async def update(harness: Any) -> None:
    """All candidates are stopped, the weights change, and groups go on."""
    await harness.rollouts.suspend()
    harness.engine.weight_version += 1
    harness.rollouts.resume()
    await settle()


async def test_a_suspended_group_restarts_and_has_one_version() -> None:
    harness = Harness(lengths(3, 9, 9, 9, 9, 9, 4, 5, 6, 9))
    waiting = await harness.begin(harness.run(4), steps=4)
    await update(harness)
    await harness.engine.run()
    record = harness.record("g")
    assert [t.index for t in await waiting] == [c.index for c in record.selected]
    assert min(c.index for c in record.selected) == 6
    assert {(c.weight_version_start, c.weight_version_end) for c in record.selected} == {(1, 1)}
    assert not record.mixed_versions
    assert [c.reason for c in record.candidates[:6]] == [DiscardReason.RESTARTED] * 6
    assert record.restarted_from == 6
    assert len(observations(record)) == 6
    assert record.tail_wait is None or record.tail_wait >= 0


async def test_weights_count_the_candidates_since_the_restart() -> None:
    harness = Harness(lengths(1, 1, 1, 9, 9, 9, 4, 5, 6, 9))
    waiting = await harness.begin(harness.run(4, "uniform"), steps=3)
    await update(harness)
    await harness.engine.run()
    await waiting
    record = harness.record("g")
    assert DiscardReason.TAIL_PRUNED in [c.reason for c in record.candidates[:6]]
    assert record.num_eligible == sum(c.weight or 0.0 for c in record.candidates) == 6


async def test_no_candidate_starts_while_the_server_is_suspended() -> None:
    harness = Harness(lengths(5))
    runs = [harness.run(2, group_id="a")]
    await settle()
    await harness.rollouts.suspend()
    runs.append(harness.run(2, group_id="b"))
    await settle()
    assert harness.engine.running == []
    assert not any(run.has_ended for run in runs)
    harness.engine.weight_version += 1
    harness.rollouts.resume()
    assert [len(group) for group in await harness.groups(runs)] == [2, 2]
    for name in "ab":
        assert {c.weight_version_start for c in harness.record(name).selected} == {1}


async def test_no_candidate_runs_after_a_caller_has_left_a_suspended_group() -> None:
    harness = Harness(lengths(5))
    waiting = await harness.begin(harness.run(2))
    await harness.rollouts.suspend()
    waiting.cancel()
    await settle()
    harness.rollouts.resume()
    await settle()
    assert harness.engine.running == []
    assert not harness.rollouts.runs


async def test_single_requests_are_restarted_with_their_own_seeds() -> None:
    harness = by_caller(7, 8, 9, 10, 20)
    callers = await harness.send_all()
    await harness.steps(2)
    await update(harness)
    group_id = callers[0].group_id
    assert [harness.origin(group_id, index) for index in range(6, 10)] == [(f"p:c{n}", 0) for n in range(4)]
    results = await finish(harness, callers)
    assert all(caller.is_answered for caller in callers), results
    record = harness.record(group_id)
    assert {c.weight_version_start for c in record.selected} == {1}
    assert not record.mixed_versions


async def test_single_requests_may_join_a_suspended_group() -> None:
    harness = by_caller(7, 8, 9, 10, 20)
    callers = [harness.send("c0"), harness.send("c1")]
    await settle()
    await harness.rollouts.suspend()
    callers += [harness.send("c2"), harness.send("c3")]
    await settle()
    assert harness.engine.running == []
    harness.engine.weight_version = 1
    harness.rollouts.resume()
    await settle()
    await finish(harness, callers)
    assert len({caller.group_id for caller in callers}) == 1
    assert all(caller.is_answered for caller in callers)
    assert {c.weight_version_start for c in harness.record(callers[0].group_id).selected} == {1}


@pytest.mark.parametrize("seed", range(40))
async def test_suspending_at_any_time_leaves_every_group_complete_and_of_one_version(seed: int) -> None:
    chance = random.Random(seed)
    drawn = [chance.randint(1, 15) for _ in range(64)]
    harness = Harness(lambda name, index: Script(drawn[(index + ord(name[0])) % 64]))
    waiting = {}
    for number in range(5):
        name = "abcde"[number]
        run = harness.run(
            chance.randint(2, 5),
            chance.choice(["shortest", "uniform", "longest"]),
            group_id=name,
            early=chance.random() < 0.5,
        )
        waiting[name] = await harness.begin(run, steps=chance.randint(0, 6))
        if chance.random() < 0.7:
            restart = asyncio.create_task(harness.rollouts.suspend())
            await settle()
            while not restart.done():
                await harness.engine.step()
                await settle()
            harness.engine.weight_version += 1
            harness.rollouts.resume()
            await settle()
    await harness.engine.run()
    for name, task in waiting.items():
        trajectories = await task
        record = harness.record(name)
        assert len(trajectories) == record.size == len(record.selected)
        assert not record.mixed_versions
    assert not harness.rollouts.runs


async def test_a_policy_that_needs_rewards_is_refused_for_requests_without_metadata() -> None:
    harness = Harness(lengths(3), {"informative": Shaping(select=Select.INFORMATIVE), "uniform": Shaping()})
    with pytest.raises(InvalidRequest, match=r"policy: 'informative' needs rewards .* POST /darts/v1/rollouts"):
        harness.plan(4, "informative")
