"""Batches that return what pruned candidates had generated."""

import asyncio
from typing import Any

import pytest

from darts_server.engine.scripted import ScriptedEngine, settle
from darts_server.exceptions import InvalidRequest
from darts_server.http.resources.rollouts_models import GroupOut
from darts_server.records import Checkpoint
from darts_server.rollout.batches.request import BatchRequest
from darts_server.rollout.batches.results import GroupResult
from darts_server.types import DiscardReason, PromptSpec
from tests.rollout.batches.test_submission import play
from tests.rollout.helpers import Harness
from tests.rollout.pruning.fake_scorer import EarlyStateEngine, FakeScorer, create_script
from tests.rollout.pruning.test_group_scorer import SHAPINGS, submit_under

pytestmark = pytest.mark.anyio
PRUNED = 0.0


def house(scorer: FakeScorer, engine: type[ScriptedEngine] = ScriptedEngine) -> Harness:
    harness = Harness(create_script([20], {0: (0.75, PRUNED)}), SHAPINGS, scorer=scorer, engine=engine)
    harness.engine.probe_width = 2
    return harness


def request(**more: Any) -> BatchRequest:
    return BatchRequest([PromptSpec(text="5")], 2, **more)


@pytest.mark.parametrize("engine", [ScriptedEngine, EarlyStateEngine], ids=["", "a state comes before its tokens"])
async def test_a_pruned_candidate_is_returned_up_to_where_it_was_pruned(engine: type[ScriptedEngine]) -> None:
    harness = house(FakeScorer(4), engine)
    [result] = await play(harness, await submit_under(harness, "arrol", request(partial=True)))
    assert result.record is not None
    assert result.record.candidates[0].checkpoints == (Checkpoint(4, PRUNED, 0.75),)
    assert result.prefixes is not None
    assert {index: len(prefix.token_ids) for index, prefix in result.prefixes.items()} == {0: 4}
    out = GroupOut.of(result)
    [partial] = out.partial or []
    assert (partial.trajectory_id, len(partial.token_ids), partial.survival) == (f"{result.group_id}:0", 4, PRUNED)
    assert [point.model_dump() for point in partial.checkpoints] == [{"tokens": 4, "survival": PRUNED, "value": 0.75}]
    assert [t.checkpoints for t in out.trajectories] == [[]] * 3, "they were certain to be kept"


async def test_candidates_pruned_before_a_restart_are_not_returned() -> None:
    harness = house(FakeScorer(4))
    submission = await submit_under(harness, "arrol", request(partial=True))

    async def collect() -> list[GroupResult]:
        return [result async for result in submission.results()]

    waiting = asyncio.create_task(collect())
    await settle()
    for _ in range(6):
        await harness.engine.step()
    await harness.rollouts.suspend()
    harness.rollouts.resume()
    await settle()
    await harness.engine.run()
    [result] = await waiting
    assert result.record is not None
    assert result.record.candidates[0].reason is DiscardReason.PRUNED
    assert result.record.restarted_from == 4
    assert result.prefixes == {}, "no weights stand for those that were kept then"


async def test_prefixes_have_log_probs_where_the_engine_computes_them() -> None:
    harness = house(FakeScorer(4, uses_hidden_states=False, uses_logprobs=True, survival=0.5))
    [result] = await play(harness, await submit_under(harness, "arrol", request(partial=True)))
    for prefix in (result.prefixes or {}).values():
        assert prefix.logprobs is None or len(prefix.logprobs) == len(prefix.token_ids) == 4
    assert (result.prefixes or {}).keys() == {0, 1, 2, 3} - result.samples.keys()


async def test_without_the_wish_there_are_neither_prefixes_nor_checkpoints() -> None:
    harness = house(FakeScorer(4))
    [result] = await play(harness, await submit_under(harness, "arrol", request()))
    assert result.prefixes is None
    out = GroupOut.of(result)
    assert out.partial is None
    assert {t.checkpoints is None for t in out.trajectories} == {True}


@pytest.mark.parametrize(("policy", "survivors"), [("arrol", False), ("darts+arrol", None), ("darts", None)])
async def test_prefixes_are_for_groups_of_all_survivors(policy: str, survivors: bool | None) -> None:
    harness = house(FakeScorer(4))
    with pytest.raises(InvalidRequest, match="does not return all survivors here; leave it out") as refused:
        await submit_under(harness, policy, request(survivors=survivors, partial=True))
    assert refused.value.field == "partial"
