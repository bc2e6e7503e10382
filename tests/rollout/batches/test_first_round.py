"""Batches on an engine that drafts from siblings start one candidate of every group first. The engine is scripted."""

import asyncio
from collections.abc import Callable

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import EngineRefused, GroupAborted
from tests.rollout.batches.streams import SIZE, WHOLE, Server, by_text, key, new_server, play, request

pytestmark = pytest.mark.anyio


def new_drafting_server(script: Callable[[str, int], Script]) -> Server:
    server = new_server(script, "off")
    server.engine.drafts_from_siblings = True
    return server


def started(server: Server) -> list[tuple[str, int]]:
    """Prompts and indices of candidates in the order in which they have reached the engine."""
    return [(candidate.request, candidate.index) for candidate in server.engine.started]


@pytest.mark.parametrize("drafts", [True, False])
async def test_the_first_candidate_of_every_group_starts_before_all_others(drafts: bool) -> None:
    server = new_server(by_text, "off")
    server.engine.drafts_from_siblings = drafts
    done = await server.run(request("9", "30", "10"))
    assert {key(result): len(result.samples) for result in done.results} == dict.fromkeys(["9", "30", "10"], SIZE)
    group_by_group = [(text, index) for text in ("9", "30", "10") for index in range(SIZE)]
    if drafts:
        assert started(server)[:3] == [("9", 0), ("30", 0), ("10", 0)]
        assert sorted(started(server)) == sorted(group_by_group)
    else:
        assert started(server) == group_by_group


@pytest.mark.parametrize("reason", ["priorities", "part"])
async def test_groups_start_whole_where_their_order_matters_more(reason: str) -> None:
    server = new_drafting_server(by_text)
    server.engine.has_priorities = reason == "priorities"
    num_groups = 1 if reason == "part" else None
    await server.run(request("9", "30", num_groups=num_groups))
    assert started(server)[:SIZE] == [("9", index) for index in range(SIZE)]


async def test_a_group_whose_first_candidate_does_not_start_holds_no_other_up() -> None:
    def script(text: str, index: int) -> Script:
        if text == "7":
            return Script(1, error=EngineRefused("no"))
        return Script(int(text))

    server = new_drafting_server(script)
    done = await server.run(request("7", "9"))
    assert {key(result): type(result.error) for result in done.results} == {"7": EngineRefused, "9": type(None)}


async def test_a_batch_that_is_cancelled_in_the_first_round_leaves_nothing_behind() -> None:
    server = new_drafting_server(by_text)
    texts = [str(length) for length in range(20, 60)]
    batch = await server.registry.start_or_find(request(*texts), WHOLE)
    batch.listeners += 1
    # Not all groups can start in one turn of the event loop.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert batch.cancel("the test ends it")
    with pytest.raises(GroupAborted):
        await play(server.harness, batch.wait())
    await settle()
    await server.engine.run()
    assert len(started(server)) < len(texts) * SIZE
    names = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
    assert not any("Candidate" in name or "darts" in name for name in names), names
    assert not server.harness.rollouts.runs
    assert server.harness.rollouts.admission.unanswered_requests == 0
