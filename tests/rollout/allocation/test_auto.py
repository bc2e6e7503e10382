"""Batches under `auto`, on the scripted engine."""

from dataclasses import replace

import pytest

from darts_server.engine.scripted import Script
from darts_server.policy.auto import AheadState, AutoLimits
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.auto import AutoBatch
from darts_server.rollout.learned.documents import Document
from tests.rollout.helpers import Harness

pytestmark = pytest.mark.anyio
SIZE, NEEDED, OFFERED = 4, 12, 18
LENGTHS = [[12, 20, 30, 38]] * (NEEDED - 1) + [[10, 20, 30, 40]]
TOGETHER = [[10, 20, 30, 40]] * NEEDED
TOKENS = 100 * NEEDED
RECORD = CohortRecord(
    "auto",
    OFFERED,
    SIZE,
    measured_seconds=20.0,
    completed=NEEDED,
    new_tokens=TOKENS,
    returned_lengths=LENGTHS,
)


def no_script(request: str, index: int) -> Script:
    raise AssertionError("no group runs")


@pytest.fixture
async def made() -> Harness:
    made = Harness(no_script)
    for batch in (1, 8, 64):
        for _ in range(50):
            made.rollouts.statistics.latency.observe(batch, 1.0)
    return made


def chosen(made: Harness, lost: int = 0) -> AutoBatch:
    return made.rollouts.allocator.auto.choose(AutoLimits(), SIZE, NEEDED, OFFERED, lost)


def state(made: Harness) -> AheadState:
    return made.rollouts.allocator.auto.load_state(SIZE)


def run(made: Harness, record: CohortRecord = RECORD, lost: int = 0) -> None:
    batch = chosen(made, lost)
    batch.mark_started()
    batch.learn(record)


async def test_batches_that_run_ahead_are_compared_with_their_trajectories_alone(made: Harness) -> None:
    assert chosen(made).choice.started == OFFERED
    for _ in range(6):
        run(made)
    assert [time for _, time in state(made).ahead] == pytest.approx([0.5] * 5), "40 steps of a second"
    assert "; running ahead takes 0.50 of the time" in chosen(made).choice.reason
    assert made.rollouts.allocator.auto.load_state(SIZE + 1) == AheadState(), "each group size is learned by itself"


@pytest.mark.parametrize(("capacity", "started"), [(None, NEEDED), (16, OFFERED)])
async def test_nothing_runs_ahead_where_groups_end_together_and_do_not_queue(
    made: Harness, capacity: int | None, started: int
) -> None:
    made.rollouts.statistics.latency.capacity = capacity
    run(made, replace(RECORD, returned_lengths=TOGETHER))
    assert chosen(made).choice.started == started


async def test_a_batch_that_was_cancelled_does_not_say_which_groups_end_together(made: Harness) -> None:
    run(made, replace(RECORD, completed=1, returned_lengths=TOGETHER[:1]))
    assert state(made).ending_last == 0.0


async def test_tokens_that_replace_unusable_ones_do_not_count_as_generated(made: Harness) -> None:
    for _ in range(2):
        run(made, lost=TOKENS // 2)
    assert [time for _, time in state(made).ahead] == pytest.approx([1.0])


@pytest.mark.parametrize("when", ["before", "meanwhile", "opened again"])
async def test_a_batch_that_was_paused_is_counted_and_not_measured(made: Harness, when: str) -> None:
    run(made)
    gate = made.rollouts.gate
    if when == "before":
        gate.close()
    batch = chosen(made)
    batch.mark_started()
    if when != "before":
        gate.close()
    if when == "opened again":
        gate.open()
    batch.learn(RECORD)
    assert (state(made).batches, state(made).ahead) == (2, ())


async def test_a_batch_that_was_cancelled_is_counted_and_not_measured(made: Harness) -> None:
    for _ in range(2):
        run(made, replace(RECORD, completed=NEEDED - 1))
    assert (state(made).batches, state(made).ahead) == (2, ())


async def test_nothing_is_learned_from_a_batch_if_state_was_restored_meanwhile(made: Harness) -> None:
    run(made)
    saved = dict(made.store.kept)
    batch = chosen(made)
    batch.mark_started()
    made.store.restore(saved)
    batch.learn(RECORD)
    assert state(made).batches == 1


async def test_nothing_is_learned_from_a_batch_without_started_groups(made: Harness) -> None:
    chosen(made).learn(RECORD)
    assert state(made) == AheadState()


async def test_without_step_times_nothing_is_measured() -> None:
    made = Harness(no_script)
    for _ in range(3):
        run(made)
    assert (state(made).batches, state(made).ahead) == (3, ())


async def test_learned_state_of_earlier_versions_is_ignored(made: Harness, caplog: pytest.LogCaptureFixture) -> None:
    earlier: Document = {"value": '{"batches": 7, "chosen": "uniform 1.5", "measured": [], "ahead": 0.5, "ran": "off"}'}
    made.store.put("auto", str(SIZE), earlier)
    made.store.put("auto", f"{SIZE} resumed", earlier)
    run(made)
    assert state(made).batches == 1
    assert caplog.text == ""
    assert made.store.get("auto", str(SIZE)) == earlier


async def test_a_state_that_cannot_be_used_is_learned_again(made: Harness, caplog: pytest.LogCaptureFixture) -> None:
    made.store.put("ahead", str(SIZE), {"value": '{"share": 2}'})
    run(made)
    assert state(made).batches == 1
    assert "is learned again" in caplog.text
