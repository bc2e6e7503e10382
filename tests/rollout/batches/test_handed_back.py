"""What a server that stops hands back of groups whose prompts are kept for the next one, on the scripted engine."""

import asyncio
from pathlib import Path

import pytest

from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.events import GroupResult
from darts_server.rollout.batches.registry import kept_bytes
from darts_server.rollout.batches.run import AnswerFormat, StreamMode
from tests.rollout.batches.test_aborted import WHOLE, finish, lengths_of, request
from tests.rollout.batches.test_saved import STOPPING, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("carry", "has_initial_weights", "tokens_are_kept"),
    [(Carry.RESUME, True, True), (Carry.RESUME, False, False), (Carry.RESTART, True, False)],
)
async def test_what_the_next_server_cannot_go_on_with_is_handed_back_and_the_prompts_are_kept(
    carry: Carry, has_initial_weights: bool, tokens_are_kept: bool, tmp_path: Path
) -> None:
    async with serving(tmp_path, has_initial_weights=has_initial_weights) as server:
        batch = await server.begin(15, "30", "12", "40", carry=carry)
        await server.stop()
        done = await batch.wait()
        assert ([result.error for result in done.results], done.carried) == ([None], 2)
        assert [(prompt.carry, prompt.error) for prompt in done.unfinished] == [(carry, STOPPING)] * 2
        groups = [prompt.group for prompt in done.unfinished]
        assert [group is None for group in groups] == [tokens_are_kept] * 2
        handed_back = [group for group in groups if group is not None]
        assert [lengths_of(group) for group in handed_back] == [dict.fromkeys(range(6), 15)] * len(handed_back)
        assert [group.error for group in handed_back] == [STOPPING] * len(handed_back)
        assert done.generated == sum(record.generated_tokens for record in server.harness.recorder.records)
    async with serving(tmp_path) as server:
        kept = [prompt for _, prompt in server.registry._carried]
        assert sorted(prompt.prompt.text or "" for prompt in kept) == ["30", "40"]
        assert [prompt.group is not None for prompt in kept] == [tokens_are_kept] * 2


async def test_a_group_that_went_on_under_other_weights_is_handed_back_with_all_of_its_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path, has_initial_weights=False) as server:
        await finish(server.harness, await server.begin(0, "30", "10", carry=Carry.RESUME, num_groups=1))
        generated = server.harness.engine.now
        server.harness.engine.weight_version = 1
        batch = await server.begin(4, carry=Carry.RESUME, carried=True)
        await server.stop()
        [prompt] = (await batch.wait()).unfinished
        assert prompt.group is not None
        assert lengths_of(prompt.group) == dict.fromkeys(range(6), generated + 4)
        spans = {aborted.version_spans for aborted in (prompt.group.aborted or {}).values()}
        assert spans == {((0, generated), (1, 4))}


async def test_groups_that_have_not_started_are_kept_and_have_nothing_to_hand_back(tmp_path: Path) -> None:
    """A large batch starts its groups in several turns of the event loop."""
    async with serving(tmp_path, has_initial_weights=False) as server:
        asked = request(*map(str, range(100, 400)), carry=Carry.RESUME)
        batch = await server.registry.open(asked, WHOLE)
        batch.listen().__enter__()
        for _ in range(4):
            await asyncio.sleep(0)
        await server.stop()
        done = await batch.wait()
        assert (len(done.unfinished), done.carried, done.results) == (300, 300, [])
        groups = [prompt.group for prompt in done.unfinished]
        assert all(isinstance(group, GroupResult) and not group.has_tokens for group in groups)


async def test_what_is_handed_back_counts_as_kept_with_its_batch(tmp_path: Path) -> None:
    sizes = []
    for has_initial_weights in (True, False):
        folder = tmp_path / str(has_initial_weights)
        async with serving(folder, has_initial_weights=has_initial_weights) as server:
            streamed = AnswerFormat(StreamMode.GROUPS)
            batch = await server.registry.open(request("3000", carry=Carry.RESUME), streamed)
            batch.listen().__enter__()
            for _ in range(1000):
                await server.harness.engine.step()
            await server.stop()
            sizes.append(kept_bytes(batch))
    assert sizes[1] > sizes[0] + 6 * 1000 * 8
