"""Answers of batches whose groups were aborted, on the scripted engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import EngineRefused, GroupAborted
from darts_server.http.resources.rollouts import _answer, encode_event
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.events import GroupEnded
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from tests.rollout.batches.streams import new_registry, read_events, run_on_stepped_clock
from tests.rollout.batches.test_aborted import begin, finish, request
from tests.rollout.batches.test_saved import serving
from tests.rollout.helpers import Harness


def by_text(text: str, index: int) -> Script:
    return Script(int(text))


async def answer(batch: BatchRun) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes((await _answer(batch)).body))
    return body


def test_a_group_that_was_aborted_has_an_error_and_no_trajectories_but_what_was_generated() -> None:
    async def scenario() -> None:
        harness = Harness(by_text)
        batch = await begin(harness, new_registry(harness, "shortest"), request("30", "5"), 9)
        harness.rollouts.abort_all("an update")
        await finish(harness, batch)
        body = await answer(batch)
        aborted, whole = body["groups"]
        assert (whole["error"], whole["aborted"], len(whole["trajectories"])) == (None, None, 4)
        assert aborted["error"] == {
            "message": "an update",
            "type": "InternalServerError",
            "param": None,
            "code": 503,
        }
        assert (aborted["trajectories"], aborted["discarded"], aborted["counted"]) == ([], [], None)
        assert (aborted["candidates"], aborted["mask"]) == (6, [False] * 6)
        assert [one["trajectory_id"] for one in aborted["aborted"]] == [f"{aborted['group_id']}:{i}" for i in range(6)]
        one = aborted["aborted"][3]
        assert (one["token_ids"], one["length"], one["cut"]) == (list(range(9)), 9, False)
        assert one["logprobs"] == [-token / 8 for token in range(9)]
        assert (one["weight_version_start"], one["weight_version_end"], one["version_spans"]) == (0, 0, [[0, 9]])
        assert body["usage"]["returned"] == 20
        assert body["usage"]["generated"] == 20 + 6 * 9 + sum(d["length"] for d in whole["discarded"])

    run_on_stepped_clock(scenario())


def test_a_batch_that_has_nothing_to_return_is_answered_with_the_error() -> None:
    async def scenario() -> None:
        harness = Harness(by_text)
        batch = await begin(harness, new_registry(harness, "shortest"), request("30"), 0)
        harness.rollouts.abort_all("an update")
        await finish(harness, batch)
        with pytest.raises(GroupAborted, match="an update"):
            await _answer(batch)

    run_on_stepped_clock(scenario())


def test_a_batch_whose_prompts_are_all_carried_over_has_no_groups_and_says_why() -> None:
    async def scenario() -> None:
        harness = Harness(by_text)
        batch = await begin(harness, new_registry(harness, "shortest"), request("30", carry=Carry.RESUME), 9)
        harness.rollouts.abort_all("an update")
        await finish(harness, batch)
        body = await answer(batch)
        assert (body["groups"], body["carried"]) == ([], 1)
        [prompt] = body["unfinished"]
        assert (prompt["number"], prompt["carry"], prompt["error"]["message"]) == (0, "resume", "an update")

    run_on_stepped_clock(scenario())


def test_prompts_that_are_carried_over_are_returned_beside_groups_of_which_all_have_failed() -> None:
    """Their caller would take them for lost otherwise, and send them again."""

    async def scenario() -> None:
        harness = Harness(lambda text, index: Script(int(text), error=EngineRefused("no") if text == "5" else None))
        batch = await begin(harness, new_registry(harness, "shortest"), request("5", "30", carry=Carry.RESUME), 9)
        harness.rollouts.abort_all("an update")
        await finish(harness, batch)
        body = await answer(batch)
        assert [(group["number"], group["error"]["message"]) for group in body["groups"]] == [(0, "no")]
        assert [(prompt["number"], prompt["carry"]) for prompt in body["unfinished"]] == [(1, "resume")]
        assert body["carried"] == 1

    run_on_stepped_clock(scenario())


@pytest.mark.parametrize("mode", [StreamMode.GROUPS, StreamMode.TOKENS])
def test_streams_have_the_tokens_of_aborted_candidates_in_the_group(mode: StreamMode) -> None:
    async def scenario() -> None:
        harness = Harness(by_text)
        batch = await new_registry(harness, "shortest").open(request("30"), AnswerFormat(mode, 2))
        listening = asyncio.create_task(read_events(batch))
        await settle()
        for _ in range(9):
            await harness.engine.step()
        harness.rollouts.abort_all("an update")
        events = await listening
        [(number, group)] = [(number, event) for number, event in events if isinstance(event, GroupEnded)]
        data = encode_event(number, group, mode).decode().split("data: ", 1)[1]
        body = json.loads(data)
        assert [one["token_ids"] for one in body["aborted"]] == [list(range(9))] * 6
        assert data.rstrip().endswith('"code":503}}')

    run_on_stepped_clock(scenario())


def test_prompts_that_are_kept_without_what_was_generated_have_it_in_the_answer_and_in_the_last_event(
    tmp_path: Path,
) -> None:
    """A server that stops after an update: the next one cannot go on with the tokens."""

    async def scenario() -> None:
        async with serving(tmp_path, by_text, has_initial_weights=False) as server:
            batch = await server.begin(9, "30", carry=Carry.RESUME)
            await server.stop()
            body = await answer(batch)
            assert batch.end is not None
            last = encode_event(9, batch.end, StreamMode.GROUPS).decode().split("data: ", 1)[1]
        assert (body["groups"], body["carried"]) == ([], 1)
        [prompt] = body["unfinished"]
        assert (prompt["carry"], prompt["error"]["code"]) == ("resume", 503)
        assert [(one["length"], one["version_spans"]) for one in prompt["aborted"]] == [(9, [[0, 9]])] * 6
        assert json.loads(last)["unfinished"] == body["unfinished"]

    run_on_stepped_clock(scenario())
