"""A cut on an engine. No policy sets a limit yet, so the group is told directly."""

import asyncio

import numpy as np
import pytest

from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.policy.events import LimitSet
from darts_server.policy.group import Group
from darts_server.policy.selection import SampledTail
from darts_server.rollout.ledger import Ledger
from darts_server.rollout.run import GroupRun
from darts_server.types import End, FinishReason
from tests.rollout.helpers import Recorder, collect

pytestmark = pytest.mark.anyio


async def play(script: dict[int, Script], limit: int) -> tuple[dict[int, list[int]], Recorder, ScriptedEngine]:
    engine = ScriptedEngine(lambda _, index: script[index])
    recorder = Recorder()
    group = Group(rule=SampledTail(2, 1), candidates=len(script), rng=np.random.default_rng(0), spare=3)
    run: GroupRun[str, list[int]] = GroupRun(
        engine, "prompt", group, Ledger("g", "cut", 2, lambda: engine.now), recorder, lambda: None
    )
    waiting = asyncio.create_task(collect(run))
    await settle()
    group.handle(LimitSet(limit))
    for _ in range(100):
        await engine.step()
        run.peek()
        await settle()
    return {t.index: t.output for t in await waiting}, recorder, engine


async def test_the_tail_is_cut_at_the_limit_and_counts_as_truncated_there() -> None:
    got, recorder, engine = await play({0: Script(2), 1: Script(3), 2: Script(50), 3: Script(60)}, limit=7)
    [record] = recorder.records
    [tail] = [c for c in record.selected if c.end is End.LONG]
    assert tail.cut
    assert tail.tokens == 7
    assert tail.finish_reason is FinishReason.LENGTH
    assert got[tail.index] == list(range(7))
    assert engine.running == []
    assert engine.now >= 7


async def test_one_that_ended_beyond_the_limit_before_anyone_looked_is_trimmed() -> None:
    # Both tails end by themselves in the same step as the second short one, beyond the limit.
    got, recorder, _ = await play({0: Script(2), 1: Script(9), 2: Script(10), 3: Script(10)}, limit=5)
    [record] = recorder.records
    [tail] = [c for c in record.selected if c.end is End.LONG]
    assert len(got[tail.index]) == 5
    assert tail.cut
