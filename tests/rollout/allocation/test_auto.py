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
from darts_server.policy.auto.chooser import MIN_OFF, MOST_CANDIDATES, Choice, choose, hindsight
from darts_server.policy.auto.options import AutoLimits, build_auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CohortRecord, applied_policy
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import Planner
from darts_server.rollout.run import GroupRun
from darts_server.types import AUTO, DiscardReason, FinishReason, MaxLost, Outcome, RequestOptions
from tests.rollout.helpers import Harness, collect

pytestmark = pytest.mark.anyio
SIZE, GROUPS = 4, 10
LIMITS = AutoLimits(allow=("uniform", "cap"), most_lost=1.0, most_bias=1.0, exploration=0.0)


def script(request: str, index: int) -> Script:
    """One candidate in twelve is twelve times as long."""
    rng = np.random.default_rng([*request.encode(), index])
    return Script(120 if rng.random() < 1 / 12 else int(rng.integers(8, 13)))


def harness(limits: AutoLimits = LIMITS, scripts: Callable[[str, int], Script] = script) -> Harness:
    made = Harness(scripts)
    auto = build_auto(Shaping(), Deadline(exploration=0.0), limits)
    made.rollouts.planner = Planner({}, AUTO, made.limits, auto)
    for batch in (1, 8, 64):
        for _ in range(50):
            made.rollouts.statistics.latency.observe(batch, 1.0)
    return made


def names_of(cohort: str, groups: int = GROUPS) -> list[str]:
    return [f"{cohort}-{number}" for number in range(groups)]


async def start(made: Harness, cohort: str) -> list[GroupRun[str, list[int]]]:
    return await made.start_cohort(SIZE, AUTO, names_of(cohort))


async def cohort(made: Harness, name: str, groups: int = GROUPS, size: int = SIZE) -> CohortRecord:
    """Run groups that are allocated together, and check that the same was done with all of them."""
    names = names_of(name, groups)
    trajectories = await made.groups(await made.start_cohort(size, AUTO, names))
    assert [len(group) for group in trajectories] == [size] * groups
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


async def allocate(made: Harness, cohort: str) -> list[Allocation]:
    plan, allocator = made.plan(SIZE, AUTO), made.rollouts.allocator
    return await asyncio.gather(*(allocator.allocate(plan, name) for name in names_of(cohort)))


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
    await asyncio.gather(*(choose_for(made, names_of("p")) for _ in range(4)))
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
        choice = await choose_for(made, names_of("step0"))
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
    plan, names = made.plan(SIZE, AUTO), names_of("p")
    assert plan.auto is not None
    [uniform] = [option for option in plan.auto.options if option.name == "uniform 1.5"]
    choice = Choice(uniform, "for the test")
    allocations = made.rollouts.allocator.allocate_cohort(plan, names, chosen=choice)
    waiting = [asyncio.create_task(collect(run)) for run in made.start_allocated(plan, names, allocations)]
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


async def test_a_cohort_that_was_cancelled_teaches_nothing_and_the_time_after_it_is_no_training() -> None:
    made = harness()
    await cohort(made, "step0")
    made.engine.now += 7
    for run in await start(made, "cancelled"):
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
    await made.groups(await start(made, "next"))
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
    waiting = [asyncio.create_task(collect(run)) for run in await start(made, "paused")]
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
    allocations = await allocate(made, "fewer")
    assert allocations[0].candidates > SIZE
    before, fewer = learned(made), [replace(allocation, candidates=SIZE) for allocation in allocations]
    await made.groups(made.start_allocated(made.plan(SIZE, AUTO), names_of("fewer"), fewer))
    assert learned(made).measured == before.measured


async def test_a_cohort_of_which_nothing_can_be_learned_is_reported_and_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = harness()

    def fail(*_: object) -> AutoState:
        raise ValueError("cannot be learned")

    monkeypatch.setattr("darts_server.rollout.allocation.auto.learn", fail)
    await cohort(made, "step0")
    assert len(made.recorder.cohorts) == 1


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
    runs = await start(made, "restored")
    made.store.restore({})
    await made.groups(runs)
    assert learned(made) == AutoState()
    made.engine.now += 7
    for step in range(2):  # and those after it do not count as running beside it
        await cohort(made, f"step{step + 1}")
        made.engine.now += 7
    assert learned(made).batches == 2
    assert len(learned(made).training) == 1


async def resuming(
    made: Harness, batches: int, ahead: float, *, closes: bool = False, restores: bool = False, complete: int = 12
) -> list[int]:
    """Return how many of 18 prompts run in batches that need 12 and take 60 s, or ``ahead`` times as long with more.

    ``closes``: whether the gate closes meanwhile; ``restores``: whether state is restored. ``complete``: groups.
    """
    auto, names, begun = made.rollouts.allocator.auto, names_of("resumed", 18), list[int]()
    plan, tokens = made.rollouts.planner.plan(SIZE, RequestOptions(AUTO), in_batch=True), [UNKNOWN_TOKENS] * len(names)
    assert plan is not None
    for _ in range(batches):
        choice = await auto.choose(plan, names, tokens, 12, resumes=True)
        assert choice is not None
        assert choice.begun is not None
        record = CohortRecord(AUTO, len(names), SIZE)
        begin, end = auto.follow(plan, names, tokens, choice, record, None)
        begin()
        if closes:
            made.rollouts.gate.close()
            made.rollouts.gate.open()
        if restores:
            made.store.restore(dict(made.store.kept))
        record.returned_lengths = [[30] * SIZE] * 11 + [[60] * SIZE]
        record.returned_tokens = record.new_tokens = sum(map(sum, record.returned_lengths))
        record.completed = complete
        record.measured_seconds = 60.0 * (ahead if choice.begun > 12 else 1.0)
        end()
        begun.append(choice.begun)
    return begun


@pytest.mark.parametrize(("ahead", "later"), [(0.8, 18), (1.25, 12)])
async def test_as_many_prompts_run_as_are_faster_where_the_others_go_on_later(ahead: float, later: int) -> None:
    made = harness(AutoLimits())
    assert await resuming(made, 4, ahead) == [18, 18, 18, 18]
    assert (await resuming(made, 8, ahead))[2:] == [later] * 6
    assert made.rollouts.allocator.auto.state(SIZE) == AutoState(), "other batches are not compared with them"


@pytest.mark.parametrize("trouble", [{"closes": True}, {"complete": 11}, {"restores": True}])
async def test_batches_that_were_paused_or_cancelled_or_ran_across_a_restore_do_not_say_what_is_faster(
    trouble: dict[str, Any],
) -> None:
    made = harness(AutoLimits())
    assert set(await resuming(made, 12, 1.25, **trouble)) == {18}
    state = made.rollouts.allocator.auto.state(SIZE, resumes=True)
    assert (state.batches, state.measured) == (0 if "restores" in trouble else 11, ())
