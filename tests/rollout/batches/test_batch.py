"""Whole batches on the scripted engine."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, InvalidRequest
from darts_server.policy.auto import AutoLimits
from darts_server.rollout.batches.batch import BatchRequest, plan_batch, prepare_batch
from darts_server.rollout.batches.carried import CarriedPrompts, Carry
from darts_server.rollout.batches.events import BatchDone, GroupResult, Unfinished
from darts_server.rollout.batches.run import AnswerFormat, BatchRun
from darts_server.rollout.plan import Limits, Planner
from darts_server.types import Outcome, PromptSpec
from tests.rollout.batches.streams import SHAPINGS, finish
from tests.rollout.helpers import Harness, Texts

pytestmark = pytest.mark.anyio
SIZE = 4
TAILED = [str(1000 + number) for number in range(12)]


def script(prompt: str, index: int) -> Script:
    """The prompt ``"20"`` has lengths from 20 on; of the ``TAILED`` ones, one candidate in five is long."""
    prompt = prompt.partition(" ")[0]
    if prompt in TAILED:
        return Script(400 if (int(prompt) + index) % 5 == 0 else 10)
    return Script(int(prompt) + index, error=CandidateFailed("broken") if prompt == "7" else None)


async def submit(harness: Harness, batch: BatchRequest, default: str = "shortest") -> BatchRun:
    def new_planner(overrides: Mapping[str, object]) -> Planner:
        return Planner(SHAPINGS, str(overrides.get("name", default)), Limits(64), AutoLimits())

    kept, harness.rollouts.planner = CarriedPrompts(), new_planner({})
    prepared = await prepare_batch(batch, harness.rollouts, Texts(), new_planner, kept)
    return BatchRun(prepared, harness.rollouts, Texts(), kept, AnswerFormat())


def batch_request(*texts: str, **more: Any) -> BatchRequest:
    return BatchRequest([PromptSpec(text=text) for text in texts], SIZE, **more)


async def play(harness: Harness, batch: BatchRun) -> Sequence[GroupResult]:
    return (await finish(harness, batch)).results


def unfinished(batch: BatchRun) -> Sequence[Unfinished]:
    assert isinstance(batch.end, BatchDone)
    return batch.end.unfinished


async def test_new_prompts_start_as_if_they_had_the_length_of_the_data_set_and_ties_keep_their_order() -> None:
    harness = Harness(script)
    await play(harness, await submit(harness, batch_request("10", "30", "80", "90")))
    harness.engine.weight_version += 1  # ends the data set's first step
    await play(harness, await submit(harness, batch_request("10")))
    harness.rollouts.statistics.flush()
    assert 30 < (harness.rollouts.statistics.dataset.stats.mean or 0) < 80
    harness.engine.started.clear()
    await play(harness, await submit(harness, batch_request("10", "11", "30", "12")))
    order = list(dict.fromkeys(candidate.request for candidate in harness.engine.started))
    assert order == ["11", "12", "30", "10"], "new ones first: longer than both that are known"


@pytest.mark.parametrize("policy", ["shortest", "darts"])
async def test_a_budget_is_spent_exactly_under_any_policy(policy: str) -> None:
    harness = Harness(script)
    request = batch_request("10", "30", "20", policy={"name": policy}, budget=17)
    results = await play(harness, await submit(harness, request))
    assert sum(len(result.record.candidates) for result in results if result.record) == 17


async def test_waiting_at_the_gate_does_not_count_as_time_of_the_cohort() -> None:
    harness = Harness(script)
    harness.rollouts.gate.close()
    run = await submit(harness, batch_request(*TAILED), "auto")
    waiting = asyncio.create_task(play(harness, run))
    await settle()
    harness.engine.now += 1000
    harness.rollouts.gate.open()
    await settle()
    await harness.engine.run()
    await waiting
    [record] = harness.recorder.cohorts
    assert 0 < record.measured_seconds <= 400


@pytest.mark.parametrize("carry", [Carry.DROP, Carry.RESTART])
async def test_auto_runs_all_prompts_if_their_tokens_are_not_kept(carry: Carry) -> None:
    harness = Harness(script)
    run = await submit(harness, batch_request("10", "20", "30", num_groups=2, carry=carry), "auto")
    results = await play(harness, run)
    assert len(harness.engine.started) == 3 * SIZE
    assert len(results) == 2
    [record] = harness.recorder.cohorts
    assert record.auto_choice is None
    assert harness.rollouts.allocator.auto.load_state(SIZE).batches == 0


async def test_auto_says_how_many_prompts_of_a_batch_that_resumes_have_run() -> None:
    harness = Harness(script)
    run = await submit(harness, batch_request("10", "20", "30", num_groups=2, carry=Carry.RESUME), "auto")
    results = await play(harness, run)
    reasons = {result.record.auto_choice for result in results if result.record}
    assert reasons == {"3 of 3 prompts run, and the first 2 groups are returned"}
    assert harness.recorder.cohorts[-1].auto_choice in reasons
    assert harness.rollouts.allocator.auto.load_state(SIZE).batches == 1


async def test_a_batch_of_single_trajectories_is_not_of_the_size_that_single_requests_are_joined_to() -> None:
    harness = Harness(lambda *_: Script(5))
    planner = Planner(SHAPINGS, "shortest", Limits(64, group_size=8))
    plan = plan_batch(BatchRequest([PromptSpec(text="10")], 1), harness.rollouts, lambda _: planner)
    assert (plan.policy, plan.size, plan.single) == ("off", 1, False)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (batch_request(), "prompts"),
        (batch_request("10", "x"), "prompts[1].text"),
        (batch_request("10", sampling={"any": 1}), "sampling.any"),
        (batch_request("10", policy={"name": "none"}), "policy"),
        (batch_request("10", budget=3), "budget"),
        (batch_request("10", budget=9), "budget"),
        (batch_request("10", policy={"name": "auto"}, budget=6), "budget"),
        (batch_request("10", num_groups=2), "num_groups"),
        (batch_request("10", num_groups=0), "num_groups"),
        (batch_request("10", "20", num_groups=1, carried=True), "carry"),
        (BatchRequest([PromptSpec(text="10")], 65), "group_size"),
    ],
)
async def test_an_invalid_batch_starts_nothing(wrong: BatchRequest, field: str) -> None:
    harness = Harness(script)
    with pytest.raises(InvalidRequest) as refused:
        await submit(harness, wrong)
    assert refused.value.field == field
    assert not harness.engine.started


@pytest.mark.parametrize(
    ("texts", "num_groups", "ended", "left"),
    [
        (["30", "10", "7", "20", "31"], 2, [(1, True), (2, False), (3, True)], [0, 4]),
        (["7", "10", "7", "20"], 3, [(0, False), (1, True), (2, False), (3, True)], []),
    ],
)
async def test_a_batch_ends_with_enough_complete_groups_or_when_all_groups_have_ended(
    texts: list[str], num_groups: int, ended: list[tuple[int, bool]], left: list[int]
) -> None:
    harness = Harness(script)
    run = await submit(harness, batch_request(*texts, num_groups=num_groups), "cut")
    results = await play(harness, run)
    assert sorted((result.number, result.error is None) for result in results) == ended
    assert [(u.number, u.prompt_key) for u in unfinished(run)] == [
        (number, f"key of {texts[number]}") for number in left
    ]
    outcomes = {int(record.group_id[-1]): record.outcome for record in harness.recorder.records}
    assert {number for number, outcome in outcomes.items() if outcome is Outcome.CANCELLED} == set(left)
    assert len(harness.rollouts.runs) == len(harness.engine.running) == 0
    assert len(harness.recorder.cohorts) == 1
