import asyncio

import pytest

from darts_server.engine.scripted import settle
from darts_server.exceptions import GroupAborted, ServerStopping
from darts_server.policy.reward_stats import RewardStats, single_length
from tests.rollout.helpers import Harness, collect, lengths

pytestmark = pytest.mark.anyio


async def test_the_poller_stops_while_nothing_runs_and_restarts_for_the_next_group() -> None:
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    for _ in range(2):
        assert len(await harness.group(harness.run(4))) == 4
        await settle()
        assert [t for t in asyncio.all_tasks() if t.get_name() == "darts-poller"] == []


async def test_a_groups_pass_rate_is_of_the_rewards_before_it_started() -> None:
    """So it is a baseline that does not depend on the group, and keeps a gradient exact."""
    harness = Harness(lengths(3, 9, 4, 30, 5, 50))
    right, wrong = RewardStats(right=single_length(5, 3.0)), RewardStats(wrong=single_length(9, 1.0))
    rates = []
    earlier: list[dict[str | None, RewardStats]] = [{}, {"p": right + wrong}, {"other": wrong}]
    for reported in earlier:
        harness.rollouts.statistics.rewards.learn(reported)
        run = harness.run(4, group_id="p")
        waiting = asyncio.create_task(collect(run))
        await settle()
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
async def test_groups_with_one_id_are_all_stopped(end: str) -> None:
    """Callers choose ids: two concurrent requests with the same X-Request-Id."""
    harness = Harness(lengths(9))
    waiting = [asyncio.create_task(collect(harness.run(2))) for _ in range(2)]
    await settle()
    await harness.engine.step()
    if end == "fail_all":
        harness.rollouts.fail_all(ServerStopping("stops", 1))
    else:
        getattr(harness.rollouts, end)("g")
    await settle()
    assert (harness.rollouts.running, harness.engine.running) == (0, [])
    for task in waiting:
        with pytest.raises((GroupAborted, ServerStopping)):
            await task


async def test_groups_with_one_id_are_all_restarted_and_record_their_versions() -> None:
    harness = Harness(lengths(5))
    waiting = [asyncio.create_task(collect(harness.run(2))) for _ in range(2)]
    await settle()
    await harness.rollouts.suspend()
    assert harness.engine.running == []
    harness.rollouts.resume()
    await settle()
    await harness.engine.step()
    assert harness.rollouts.running == 2
    assert harness.rollouts.first_version("g") == 0
    harness.rollouts.weights_change()
    harness.engine.weight_version = 1
    await harness.engine.run()
    assert [len(await task) for task in waiting] == [2, 2]
    for record in harness.recorder.records:
        assert [c.version_spans for c in record.candidates if c.selected_as] == [((0, 1), (1, 4))] * 2
    assert harness.rollouts.running == 0
    assert harness.rollouts.first_version("g") is None
