"""The deadline of a batch that is divided among servers: of all, one."""

import asyncio
from itertools import product
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from darts_server.engine.scripted import Script
from darts_server.exceptions import CandidateFailed
from tests.ingress.scripted import EXPLORING, SIZE, Scripts, cluster
from tests.ingress.servers import until
from tests.ingress.test_batches import parse

pytestmark = pytest.mark.anyio
LONG = 2000


def with_tails(prompt: str, index: int) -> Script:
    """Prompts differ in length; the last candidates are far longer than those that the group needs."""
    return Script(LONG if index >= SIZE else 5 + int(prompt) + index)


def with_runaways(prompt: str, index: int) -> Script:
    """The same, but every seventh prompt has too few candidates that end."""
    return Script(LONG) if index and int(prompt) % 7 == 3 else with_tails(prompt, index)


def with_failures(prompt: str, index: int) -> Script:
    """The same as with tails, but every fifth prompt fails soon."""
    return Script(3, error=CandidateFailed("broken")) if int(prompt) % 5 == 2 else with_tails(prompt, index)


def capped(script: Scripts) -> Scripts:
    """Make the last of as many candidates long as are returned: under `cap`, a group needs the others."""
    return lambda prompt, index: script(prompt, index + 1)


def groups_of(answer: httpx.Response) -> list[Any]:
    """What a batch returned: by prompt, the length of each trajectory and whether it was cut."""
    assert answer.status_code == 200, answer.text
    return [[(each["length"], each["cut"]) for each in group["trajectories"]] for group in answer.json()["groups"]]


EVERY_PUSH = [(with_tails, "darts_cut"), (with_runaways, "cap"), (with_failures, "darts_cut")]
ALL = product((with_tails, with_runaways, with_failures), ("darts_cut", "cap"))


@pytest.mark.parametrize(
    ("script", "policy"),
    [each if each in EVERY_PUSH else pytest.param(*each, marks=pytest.mark.nightly) for each in ALL],
)
async def test_a_divided_batch_has_the_deadline_that_it_would_have_on_one_server(script: Scripts, policy: str) -> None:
    found = []
    for count in (1, 2, 3):
        async with cluster(count, capped(script) if policy == "cap" else script) as running:
            answer = await running.post(24, policy={"name": policy})
            assert [len(part["prompts"]) for each in running.servers for part in each.parts] == [24 // count] * count
            deadlines = {record.deadline for each in running.servers for record in each.harness.recorder.cohorts}
            found.append((deadlines, groups_of(answer)))
    assert found[0] == found[1] == found[2]
    deadlines, groups = found[0]
    assert len(deadlines - {None}) == 1
    assert any(cut for trajectories in groups for _, cut in trajectories)


async def test_the_leading_part_decides_for_all_whether_the_batch_explores() -> None:
    def script(prompt: str, index: int) -> Script:
        return Script(60 if index >= SIZE else 5 + int(prompt) + index)

    async with cluster(3, script, EXPLORING) as running:
        groups = groups_of(await running.post(24))
        assert not any(cut for trajectories in groups for _, cut in trajectories)
        cohorts = [record for each in running.servers for record in each.harness.recorder.cohorts]
        assert [(cohort.explored, cohort.deadline) for cohort in cohorts] == [(True, cohorts[0].deadline)] * 3
        assert cohorts[0].deadline is not None
        records = [record for each in running.servers for record in each.harness.recorder.records]
        assert all(record.explored for record in records), "also those that ended before the deadline was known"
        assert all(each.deadlines[0]["explored"] for each in running.servers)


@pytest.mark.parametrize("stream", ["groups", "tokens"])
async def test_callers_do_not_get_what_servers_report(stream: str) -> None:
    async with cluster(2, with_tails) as running:
        events = parse(await running.post(16, stream=stream))
        assert all(each.deadlines for each in running.servers)
        assert {name for name, _ in events} - {"delta", "trajectory", "discard"} == {"batch", "group", "done"}
        assert set(events[0][1]) == {"id", "policy", "groups", "survivors", "sampling"}


@pytest.mark.parametrize("lost", [0, 2])
async def test_without_a_server_that_was_lost_the_others_have_a_deadline_and_its_prompts_get_the_same(
    lost: int,
) -> None:
    async with cluster(3, with_tails) as running:
        call = asyncio.create_task(running.post(30))
        dying, others = running.servers[lost], [each for at, each in enumerate(running.servers) if at != lost]
        await until(lambda: all(each.tokens >= 4 for each in running.servers))
        running.is_paused = True
        await asyncio.sleep(0.1)
        assert not any(each.deadlines and each.deadlines[-1]["tokens"] for each in running.servers)
        await dying.server.kill()
        await asyncio.sleep(0.2)
        running.is_paused = False
        groups = groups_of(await call)
        assert [len(trajectories) for trajectories in groups] == [SIZE] * 30
        assert max(length for trajectories in groups for length, _ in trajectories) < 100
        cohorts = [record for each in others for record in each.harness.recorder.cohorts]
        assert len(cohorts) == 4
        assert len({cohort.deadline for cohort in cohorts}) == 1
        assert cohorts[0].deadline is not None


async def test_groups_too_few_for_a_deadline_wait_for_those_of_a_server_that_was_lost() -> None:
    def script(prompt: str, index: int) -> Script:
        return Script(80 if index >= SIZE else 5 + int(prompt) + index)

    async with cluster(2, script) as running:
        call = asyncio.create_task(running.post(10))
        await until(lambda: all(each.tokens >= 4 for each in running.servers))
        await running.servers[0].server.kill()
        groups = groups_of(await call)
        assert [len(trajectories) for trajectories in groups] == [SIZE] * 10
        first, second = running.servers[1].harness.recorder.cohorts
        assert first.deadline is None
        assert second.deadline is not None


async def test_a_server_that_refuses_its_deadline_runs_its_groups_to_their_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("darts_server.ingress.batches.deadline.RETRY_SECONDS", 0.001)

    def script(prompt: str, index: int) -> Script:
        return Script(150 if index >= SIZE else 5 + int(prompt) + index)

    async with cluster(2, script) as running:
        refusing, other = running.servers
        app = refusing.server.app
        assert app is not None

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            await (JSONResponse({}, 500) if scope["method"] == "PUT" else app)(scope, receive, send)

        refusing.server.app = refuse
        groups = groups_of(await running.post(16))
        assert [len(trajectories) for trajectories in groups] == [SIZE] * 16
        assert [record.deadline is None for record in refusing.harness.recorder.cohorts] == [True]
        assert [record.deadline is None for record in other.harness.recorder.cohorts] == [False]
        assert "gets no deadline" in caplog.text
