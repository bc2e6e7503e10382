"""Cohorts under `auto`, on the scripted engine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any

import numpy as np
import pytest

from darts_server.engine.port import UNKNOWN_TOKENS
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import InvalidRequest
from darts_server.policy.auto.chooser import MIN_OFF, MOST_CANDIDATES, Choice, choose, hindsight
from darts_server.policy.auto.options import AutoLimits, build_auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CohortRecord, applied_policy
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import Planner
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.types import AUTO, DiscardReason, FinishReason, MaxLost, Outcome, RequestOptions
from tests.rollout.helpers import Documents, Harness, collect

pytestmark = pytest.mark.anyio
SIZE, GROUPS = 4, 10
LIMITS = AutoLimits(allow=("uniform", "cap"), most_lost=1.0, most_bias=1.0, exploration=0.0)


def script(request: str, index: int) -> Script:
    """One candidate in twelve is twelve times as long."""
    rng = np.random.default_rng([*request.encode(), index])
    return Script(120 if rng.random() < 1 / 12 else int(rng.integers(8, 13)))


def harness(
    store: Documents | None = None, limits: AutoLimits = LIMITS, scripts: Callable[[str, int], Script] = script
) -> Harness:
    made = Harness(scripts, store=store)
    auto = build_auto(Shaping(), Deadline(exploration=0.0), limits)
    made.rollouts.planner = Planner({}, AUTO, made.limits, auto)
    for batch in (1, 8, 64):
        for _ in range(50):
            made.rollouts.statistics.latency.observe(batch, 1.0)
    return made


async def finish(
    made: Harness, runs: list[GroupRun[str, list[int]]], meanwhile: Callable[[], object] = lambda: None
) -> list[int]:
    """Run groups to their end; return how many trajectories each has. ``meanwhile``: called once they have started."""
    waiting = [asyncio.create_task(collect(run)) for run in runs]
    await settle()
    meanwhile()
    await made.engine.run()
    return [len(trajectories) for trajectories in await asyncio.gather(*waiting)]


async def cohort(made: Harness, name: str, groups: int = GROUPS, size: int = SIZE) -> CohortRecord:
    """Run groups that are allocated together, and check that the same was done with all of them."""
    names = [f"{name}-{number}" for number in range(groups)]
    assert await finish(made, await made.start_cohort(size, AUTO, names)) == [size] * groups
    records = [made.record(each) for each in names]
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert {record.policy for record in records} == {AUTO}
    assert len({record.chosen for record in records}) == 1
    assert len({len(record.candidates) for record in records}) == 1
    assert records[0].chosen == made.recorder.cohorts[-1].chosen
    made.rollouts.statistics.flush()
    return made.recorder.cohorts[-1]


async def learning(made: Harness, batches: int = MIN_OFF + 2) -> CohortRecord:
    for step in range(batches):
        last = await cohort(made, f"step{step}")
    return last


async def allocate(made: Harness, name: str) -> list[Allocation]:
    plan = made.plan(SIZE, AUTO)
    return await asyncio.gather(*(made.rollouts.allocator.allocate(plan, f"{name}-{i}") for i in range(GROUPS)))


async def choose_for(made: Harness, keys: list[str]) -> Choice:
    auto = made.rollouts.allocator.auto
    choice = await auto.choose(made.plan(SIZE, AUTO), keys, [UNKNOWN_TOKENS] * len(keys))
    assert choice is not None
    return choice


def learned(made: Harness, size: int = SIZE) -> AutoState:
    return made.rollouts.allocator.auto.state(size)


def option(record: CohortRecord) -> str:
    assert record.chosen is not None
    return record.chosen.option


async def test_it_begins_as_off_and_then_does_not_wait_for_the_tail() -> None:
    made = harness()
    first, *others = [await cohort(made, f"step{step}") for step in range(4)]
    assert (option(first), first.mean_candidates, first.predicted_seconds) == ("off", SIZE, None)
    assert "off" not in [option(record) for record in others]
    assert max(record.measured_seconds for record in others) < first.measured_seconds
    for record in others:
        assert record.predicted_seconds is not None
        assert record.completed == GROUPS


async def test_the_first_cohort_is_forecast_once_another_begins_and_counts_as_measured() -> None:
    made = harness()
    await cohort(made, "step0")
    assert learned(made).measured == ()
    await cohort(made, "few", groups=3)
    assert learned(made).measured == ()
    await cohort(made, "step1")
    [off, _] = learned(made).measured
    assert (off.name, off.batch) == ("off", 1)
    assert 0 < abs(off.error) < 0.5
    assert abs(off.length_error) < 0.1, "by the lengths that it had"
    assert len(learned(made).means) == 2 * GROUPS, "each counts once"


async def test_what_was_not_forecast_before_a_restore_teaches_nothing() -> None:
    made = harness()
    await cohort(made, "step0")
    made.store.restore(dict(made.store.kept))
    record = await cohort(made, "step1")
    assert option(record) == "off"
    assert [one.batch for one in learned(made).measured] == [2]


async def test_what_is_forecast_while_state_is_restored_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = harness()
    await cohort(made, "step0")

    def restored(*arguments: Any) -> Choice:
        made.store.restore({})
        return hindsight(*arguments)

    monkeypatch.setattr("darts_server.rollout.allocation.auto.hindsight", restored)
    await cohort(made, "step1")
    assert learned(made).measured == ()


async def test_what_it_has_learned_survives_a_restart() -> None:
    store = Documents()
    made = harness(store)
    last = await learning(made)
    before = learned(made)
    assert before.count("off") == MIN_OFF
    again = harness(store)
    assert learned(again) == before
    assert option(last) != "off"
    assert option(await cohort(again, "later")) != "off"


async def test_a_few_groups_alone_are_not_shaped_and_are_no_batch() -> None:
    made = harness()
    for step in range(MIN_OFF + 3):
        record = await cohort(made, f"step{step}", groups=3)
        assert option(record) == "off"
    assert learned(made).batches == 0


async def test_forecasts_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = harness()
    running, most = 0, 0

    def slow(*arguments: Any) -> Choice:
        nonlocal running, most
        running += 1
        most = max(most, running)
        sleep(0.02)
        running -= 1
        return choose(*arguments)

    monkeypatch.setattr("darts_server.rollout.allocation.auto.choose", slow)
    await asyncio.gather(*(choose_for(made, [f"p{number}" for number in range(GROUPS)]) for _ in range(4)))
    assert most == 1


async def test_forecasts_take_as_many_samples_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = harness()
    await learning(made, MIN_OFF + 1)
    used, seconds_a_sample = [], 0.0

    def slow(*arguments: Any) -> Choice:
        most_samples = arguments[7]
        used.append(most_samples)
        made.engine.now += seconds_a_sample * arguments[3].samples(most_samples)
        return choose(*arguments)

    monkeypatch.setattr("darts_server.rollout.allocation.auto.choose", slow)
    for share in (0.004, 0.004, 0.1, 0.1, 0.0001, 0.0001, 0.0001):
        choice = await choose_for(made, [f"step0-{number}" for number in range(GROUPS)])
        seconds_a_sample = share * choice.off_seconds
    assert used == [8, 8, 2, 2, 1, 1, 8]


@pytest.mark.parametrize(
    ("capacity", "others", "generated", "left"),
    [
        (30, 0, False, 6),  # its own candidates queue, as was expected
        (60, 30, False, 5),
        (60, 60, False, 4),
        (200, 60, False, 6),  # there is room for all
        (60, 60, True, 6),  # too late: what is given up would depend on what was generated
    ],
)
async def test_extra_candidates_are_given_up_if_others_fill_the_engine_before_anything_is_generated(
    capacity: int, others: int, generated: bool, left: int
) -> None:
    made = harness()
    plan, names = made.plan(SIZE, AUTO), [f"p{number}" for number in range(GROUPS)]
    assert plan.auto is not None
    [uniform] = [option for option in plan.auto.options if option.name == "uniform 1.5"]
    choice = Choice(uniform, "for the test")
    allocations = made.rollouts.allocator.allocate_cohort(plan, names, chosen=choice)
    runs = [
        made.rollouts.start(GroupSpec(plan, name, name, name), allocation)
        for name, allocation in zip(names, allocations, strict=True)
    ]
    waiting = [asyncio.create_task(collect(run)) for run in runs]
    await settle()
    if generated:
        await made.engine.step()
    made.rollouts.allocator._capacity = capacity
    beside = [await made.engine.start("other", index) for index in range(others)]
    await settle()
    for other in beside:
        other.stop()
    await made.engine.run()
    assert {len(trajectories) for trajectories in await asyncio.gather(*waiting)} == {SIZE}
    expected = [index >= left for index in range(6)]
    for name in names:
        record = made.record(name)
        assert [c.reason is DiscardReason.LOAD for c in record.candidates] == expected
        assert record.counted == left
    assert made.recorder.cohorts[-1].candidates == left * GROUPS
    assert made.recorder.cohorts[-1].reduced == (left < 6)
    assert learned(made).count("uniform 1.5") == 0
    assert made.engine.unfinished == 0


async def test_statistics_of_prompts_are_not_read_for_a_batch_of_too_many_candidates() -> None:
    made = harness()
    made.store.get = None  # type: ignore[method-assign,assignment]  # a read fails
    assert "more than" in (await choose_for(made, ["p"] * MOST_CANDIDATES)).reason


async def test_it_learns_how_many_trajectories_reach_their_token_limit() -> None:
    reasons = (FinishReason.LENGTH, FinishReason.STOP)
    made = harness(scripts=lambda _, index: Script(10, finish_reason=reasons[index > 0]))
    for step in range(2):
        record = await cohort(made, f"step{step}")
        assert (record.returned, record.truncated, record.cut) == (GROUPS * SIZE, GROUPS, 0)
    state = learned(made)
    assert state.truncated == 1 / SIZE
    [off, *_] = state.measured
    assert off.more_truncated == pytest.approx(1 / SIZE - 1), "by their lengths all would have"


async def test_group_sizes_are_learned_apart() -> None:
    made = harness()
    await learning(made)
    assert option(await cohort(made, "other", size=3)) == "off"


async def test_a_cohort_that_was_cancelled_teaches_nothing_and_the_time_after_it_is_no_training() -> None:
    made = harness()
    await cohort(made, "step0")
    made.engine.now += 7
    for run in await made.start_cohort(SIZE, AUTO, [f"cancelled-{number}" for number in range(GROUPS)]):
        run.cancel()
    await settle()
    assert learned(made).batches == 2
    assert [one.name for one in learned(made).measured] == ["off"]
    made.engine.now += 1
    await cohort(made, "step1")
    assert [one.batch for one in learned(made).measured] == [1, 3]
    [(_, seconds)] = learned(made).training
    assert seconds == pytest.approx(7.0)


async def test_under_a_limit_every_trajectory_ends_at_a_length_that_is_known_from_the_start() -> None:
    made = harness(limits=replace(LIMITS, allow=("limit",)))
    record = await learning(made)
    assert option(record).startswith("limit ")
    assert record.mean_candidates == SIZE
    assert record.deadline is not None
    assert 10 < record.deadline < 120
    assert record.longest <= record.deadline
    assert record.cut > 0
    allocation, *_ = await allocate(made, "next")
    assert allocation.cohort is not None
    tokens, rule = allocation.cohort.deadline.tokens, allocation.cohort.rule
    assert tokens is not None
    assert rule is not None
    assert rule.bound_of(tokens) == tokens


async def test_an_options_deadline_is_stretched_by_what_that_option_has_lost() -> None:
    limits = replace(LIMITS, allow=("limit",))
    made, auto = harness(limits=limits), build_auto(Shaping(), Deadline(), limits)
    await learning(made)
    stretches = {applied_policy(AUTO, each.name): 1 + number / 100 for number, each in enumerate(auto.options)}

    def stretch(policy: str, max_lost: MaxLost) -> float:
        return stretches[policy]

    made.rollouts.allocator.deadlines.stretch = stretch  # type: ignore[method-assign]  # instead of hundreds of rewards
    await finish(made, await made.start_cohort(SIZE, AUTO, [f"next-{number}" for number in range(GROUPS)]))
    record = made.record("next-0")
    assert record.chosen is not None
    assert record.chosen.option.startswith("limit ")
    assert record.stretch == stretches[record.applied_policy] > 1


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("closes_first", [True, False])
async def test_a_cohort_that_ran_while_the_gate_was_closed_teaches_nothing(opens: bool, closes_first: bool) -> None:
    made = harness()
    await cohort(made, "step0")
    gate = made.rollouts.gate
    if closes_first:
        gate.close()
    runs = await made.start_cohort(SIZE, AUTO, [f"paused-{number}" for number in range(GROUPS)])
    waiting = [asyncio.create_task(collect(run)) for run in runs]
    await settle()
    await made.engine.step()
    gate.close()
    if opens:
        gate.open()
    await made.engine.run()
    await asyncio.gather(*waiting)
    gate.open()
    assert [one.batch for one in learned(made).measured] == [1]
    await cohort(made, "step1")
    assert [one.batch for one in learned(made).measured] == [1, 3]


async def test_a_cohort_with_fewer_candidates_than_chosen_teaches_nothing() -> None:
    made = harness(limits=replace(LIMITS, allow=("cut",)))
    await learning(made, MIN_OFF + 1)
    plan, names = made.plan(SIZE, AUTO), [f"fewer-{number}" for number in range(GROUPS)]
    allocations = await allocate(made, "fewer")
    assert allocations[0].candidates > SIZE
    before = learned(made)
    runs = [
        made.rollouts.start(GroupSpec(plan, name, name, name), replace(allocation, candidates=SIZE))
        for name, allocation in zip(names, allocations, strict=True)
    ]
    await finish(made, runs)
    assert learned(made).measured == before.measured


async def test_a_cohort_of_which_nothing_can_be_learned_is_reported_and_delivered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness()

    def fail(*_: object) -> AutoState:
        raise ValueError("cannot be learned")

    monkeypatch.setattr("darts_server.rollout.allocation.auto.learn", fail)
    await cohort(made, "step0")
    assert len(made.recorder.cohorts) == 1
    assert "cannot be learned" in caplog.text


async def test_what_is_no_batch_of_that_size_does_not_change_the_time_between_batches() -> None:
    made = harness()
    await cohort(made, "step0")
    made.engine.now += 7
    await cohort(made, "few", groups=3)
    await cohort(made, "other", size=3)
    made.engine.now += 7
    for allocation in await allocate(made, "refused"):
        allocation.drop()
    between = made.engine.now
    made.engine.now += 7
    await cohort(made, "step1")
    state = learned(made)
    [(tokens, seconds)] = state.training
    assert tokens == made.recorder.cohorts[0].returned_tokens
    assert seconds == pytest.approx(between + 7 - made.recorder.cohorts[0].measured_seconds)
    assert state.batches == 2
    assert learned(made, 3).training == ()


async def test_the_time_before_a_restore_is_no_training() -> None:
    made = harness()
    await cohort(made, "step0")
    saved = dict(made.store.kept)
    made.engine.now += 7
    await cohort(made, "of another run")
    made.store.restore(saved)
    made.engine.now += 100
    await cohort(made, "step1")
    assert learned(made).training == ()
    made.engine.now += 7
    await cohort(made, "step2")
    [(tokens, seconds)] = learned(made).training
    assert seconds == pytest.approx(7.0)
    assert tokens == made.recorder.cohorts[2].returned_tokens


async def test_a_cohort_during_which_state_was_restored_teaches_nothing() -> None:
    made = harness()
    await cohort(made, "step0")
    runs = await made.start_cohort(SIZE, AUTO, [f"restored-{number}" for number in range(GROUPS)])
    await finish(made, runs, lambda: made.store.restore({}))
    assert learned(made) == AutoState()
    made.engine.now += 7
    for step in range(2):  # and those after it do not count as running beside it
        await cohort(made, f"step{step + 1}")
        made.engine.now += 7
    assert learned(made).batches == 2
    assert len(learned(made).training) == 1


async def test_it_is_known_by_name_where_it_is_configured() -> None:
    made = harness()
    assert AUTO in made.rollouts.planner.names()
    plan = made.plan(SIZE, AUTO)
    assert plan.shrunk(2).auto is plan.auto
    assert plan.shrunk(1).auto is None
    with pytest.raises(InvalidRequest, match="'auto' is unknown"):
        Planner({}, "off", made.limits).plan(8, RequestOptions("auto"))
