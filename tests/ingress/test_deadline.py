"""The deadline of a batch that is divided among servers: of all, one."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import asdict
from itertools import product
from math import ceil
from typing import Any, NoReturn

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from darts_server.engine.scripted import Script
from darts_server.exceptions import CandidateFailed
from darts_server.ingress.batches.deadline import BatchDeadline, sent_to
from darts_server.ingress.batches.request import read_batch
from darts_server.ingress.batches.run import DividedBatch
from darts_server.ingress.everyone.hold import Hold
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.routing.router import Router
from darts_server.policy.deadline import MIN_RIGHT, Answer, Deadline, DeadlineLosses
from darts_server.rollout.allocation.shared import SharedDeadline
from tests.ingress.scripted import EXPLORING, PATH, SIZE, SURE, Scripts, batch, cluster
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


async def test_parts_of_a_batch_are_no_few_groups_if_the_batch_is_not() -> None:
    found = []
    for count in (1, 3):
        async with cluster(count, capped(with_tails)) as running:
            found.append(groups_of(await running.post(9, policy={"name": "cap"})))
    assert found[0] == found[1]
    assert any(cut for trajectories in found[0] for _, cut in trajectories)


async def test_a_batch_of_few_groups_has_the_deadline_of_earlier_ones_on_the_leading_server() -> None:
    def script(prompt: str, index: int) -> Script:
        return Script(60 if index >= SIZE else 5 + int(prompt) + index)

    async with cluster(2, script) as running:
        first = groups_of(await running.post(6))
        assert not any(cut for trajectories in first for _, cut in trajectories), "nothing is known yet"
        await running.post(24)
        again = groups_of(await running.post(6))
        leading, other = running.servers
        assert [part["cohort"]["leads"] for each in running.servers for part in each.parts] == [True] * 3 + [False] * 3
        recent = {each.harness.recorder.cohorts[-1].deadline for each in running.servers}
        assert recent == {leading.deadlines[-1]["tokens"]} == {other.deadlines[-1]["tokens"]}
        assert any(cut for trajectories in again for _, cut in trajectories)


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


async def test_the_stretch_of_the_leading_server_is_that_of_all() -> None:
    late = [Answer(overrun, is_right=True) for overrun in (1.0, 1.5) for _ in range(MIN_RIGHT)]
    losses = DeadlineLosses().with_answers(late, explored=True, max_share=0.02)
    async with cluster(2, with_tails) as running:
        leading, other = (each.harness for each in running.servers)
        leading.store.put("losses", "darts_cut", {"value": json.dumps(asdict(losses))})
        stretch = losses.stretch(SURE.max_lost.answers)
        assert stretch > 1.4
        await running.post(16)
        assert {each.deadlines[-1]["stretch"] for each in running.servers} == {stretch}
        assert leading.recorder.cohorts[0].deadline == other.recorder.cohorts[0].deadline == ceil(stretch * 22)
        cut = [record for record in other.recorder.records if any(each.cut for each in record.candidates)]
        assert {record.stretch for record in cut} == {stretch}, "what is learned from them counts by it"


@pytest.mark.parametrize("policy", ["uniform", "darts", "auto", "off"])
async def test_without_a_deadline_of_the_whole_batch_nothing_is_exchanged(policy: str) -> None:
    async with cluster(2, lambda prompt, index: Script(5 + int(prompt) + index)) as running:
        answer = await running.post(16, policy={"name": policy}, stream="groups")
        assert [name for name, _ in parse(answer)] == ["batch", *["group"] * 16, "done"]
        assert [each.deadlines for each in running.servers] == [[], []]
        for each in running.servers:
            [part] = each.parts
            events = await each.server_events({**part, "prompts": part["prompts"][:2], "cohort": {"groups": 16}})
            assert [name for name, _ in events] == ["batch", "group", "group", "done"]
            assert "cohort" not in events[0][1]


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


async def test_groups_that_start_again_without_a_deadline_determine_one_together() -> None:
    def script(prompt: str, index: int) -> Script:
        """Prompts of the server that is not lost fail before those of the other one need anything."""
        return Script(3, error=CandidateFailed("broken")) if int(prompt) % 2 else with_tails(prompt, index)

    async with cluster(2, script) as running:
        call = asyncio.create_task(running.post(24))
        dying, other = running.servers
        await until(lambda: other.harness.recorder.cohorts != [])
        running.is_paused = True
        assert [prompt["text"] for prompt in dying.parts[0]["prompts"]] == [str(each) for each in range(0, 24, 2)]
        assert dying.tokens < 8
        await dying.server.kill()
        running.is_paused = False
        assert len(groups_of(await call)) == 24
        assert [cohort.deadline for cohort in other.harness.recorder.cohorts] == [None, 28]


async def test_prompts_of_a_server_that_is_lost_after_the_deadline_is_known_get_it_at_once() -> None:
    async with cluster(3, with_runaways) as running:
        call = asyncio.create_task(running.post(30))
        dying, *others = running.servers
        await until(lambda: all(each.deadlines and each.deadlines[-1]["tokens"] for each in running.servers))
        await dying.server.kill()
        groups = groups_of(await call)
        assert [len(trajectories) for trajectories in groups] == [SIZE] * 30
        tokens = dying.deadlines[-1]["tokens"]
        cohorts = [record for each in others for record in each.harness.recorder.cohorts]
        assert [cohort.deadline for cohort in cohorts] == [tokens] * len(cohorts)
        assert sum(each.parts[-1]["cohort"]["leads"] for each in others) == 0


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


async def test_a_caller_that_disconnects_ends_the_exchange() -> None:
    async with cluster(2, with_tails) as running:
        call = asyncio.create_task(running.post(16))
        await until(lambda: all(each.tokens >= 4 for each in running.servers))
        call.cancel()
        await until(lambda: not any(each.harness.rollouts.running for each in running.servers))
        assert not any(task.get_name() == "darts-deadline" for task in asyncio.all_tasks())


@pytest.mark.parametrize("stream", [{"stream": "groups"}, {"stream": "tokens", "chunk_tokens": 1}])
async def test_a_caller_that_reads_nothing_does_not_delay_the_deadline(stream: dict[str, Any]) -> None:
    def script(prompt: str, index: int) -> Script:
        """Half of the groups end before the others need anything."""
        return Script(3, error=CandidateFailed("broken")) if int(prompt) % 4 < 2 else with_tails(prompt, index)

    async with cluster(2, script) as running:
        body, fleet = read_batch(json.dumps(batch(40, **stream)).encode()), running.ingress.fleet
        assert body is not None
        divided = DividedBatch(body, Outgoing("POST", PATH), "", fleet, Router(fleet), Hold())
        async with aclosing(divided.events()) as events:
            await anext(events)
            await until(lambda: all(each.deadlines and each.deadlines[-1]["tokens"] for each in running.servers))
            assert sum([event.name == "group" async for event in events]) == 40


async def test_a_task_that_is_cancelled_while_it_stops_its_messages_ends() -> None:
    is_stopping = asyncio.Event()

    class SlowToStop(HttpReplica):
        async def send(self, request: Outgoing) -> NoReturn:
            try:
                await asyncio.Event().wait()
            finally:
                is_stopping.set()
                await asyncio.sleep(0.05)
            raise AssertionError

    deadline = BatchDeadline(10)
    deadline.start_part({**TERMS, "explored": True}, leads=True)
    member = Member(SlowToStop("http://127.0.0.1:1"))

    async def run() -> None:
        async with sent_to(member, "batch-1", deadline, Outgoing("POST", PATH), Fleet([])):
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await is_stopping.wait()
    running.cancel()
    await asyncio.wait([running], timeout=1)
    assert running.cancelled()


async def test_what_ingresses_add_is_refused_from_callers() -> None:
    async with cluster(2, with_tails) as running:
        answer = await running.post(16, stream="groups", cohort={"groups": 99})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cohort")
        answer = await running.ingress.client.put(f"{PATH}/batch-1/deadline", json={"bound": 2})
        assert answer.status_code == 501


# --- what is computed ------------------------------------------------------------

TERMS = {"rule": asdict(Deadline(stretch=1.5)), "few": False, "tokens": None, "explored": False}
"""What a part says of its cohort."""


def test_the_terms_of_the_part_that_leads_count_whichever_starts_first() -> None:
    deadline = BatchDeadline(10)
    assert [deadline.choose_leader(), deadline.choose_leader()] == [True, False]
    deadline.start_part({**TERMS, "rule": asdict(Deadline(stretch=9))}, leads=False)
    deadline.report([(number, 10) for number in range(9)], [])
    assert deadline.known is None
    deadline.start_part({**TERMS, "explored": True}, leads=True)
    assert deadline.known == SharedDeadline(15, None, explored=True, stretch=1.5, bound=2.0)
    deadline.lose_leader()
    assert not deadline.choose_leader()


@pytest.mark.parametrize("starts_first", [True, False])
def test_if_the_part_that_leads_is_lost_before_it_starts_the_terms_of_another_count(starts_first: bool) -> None:
    deadline = BatchDeadline(10)
    assert deadline.choose_leader()
    if starts_first:
        deadline.start_part(TERMS, leads=False)
    deadline.lose_leader()
    deadline.start_part({**TERMS, "rule": asdict(Deadline(stretch=9))} if starts_first else TERMS, leads=False)
    deadline.report([(number, 10) for number in range(9)], [])
    assert deadline.known == SharedDeadline(15, None, explored=False, stretch=1.5, bound=2.0)


def test_a_part_with_a_deadline_of_its_own_has_no_terms() -> None:
    deadline = BatchDeadline(10)
    assert deadline.choose_leader()
    deadline.start_part(None, leads=True)
    deadline.lose_leader()
    deadline.report([(number, 10) for number in range(10)], [])
    assert deadline.known is None
    assert deadline.choose_leader(), "there may be one in the next round"


def test_a_batch_of_nothing_but_runaways_has_a_deadline_from_earlier_groups() -> None:
    deadline = BatchDeadline(12)
    deadline.start_part({**TERMS, "rule": asdict(Deadline(recent=10))}, leads=True)
    assert deadline.known == SharedDeadline(None, 80, explored=False, bound=2.0)
    deadline.report([], [(number, 81) for number in range(12)])
    assert (deadline.known or SharedDeadline()).tokens == 40


def test_groups_that_were_lost_count_again_when_they_start_again() -> None:
    deadline = BatchDeadline(12)
    deadline.start_part(TERMS, leads=True)
    deadline.report([(number, 10) for number in range(6)], [(8, 90), (9, None)])
    deadline.end_group(0)
    deadline.lose_groups([0, 5, 8, 9])
    assert deadline.known is None
    deadline.restart_groups()
    deadline.report([(6, 20), (7, 20), (10, 20)], [])
    assert deadline.known == SharedDeadline(None, 60, explored=False, stretch=1.5, bound=2.0)
    deadline.report([(8, 30), (5, 30)], [(5, 70), (11, 70)])
    assert (deadline.known or SharedDeadline()).tokens is None, "group 11 is beyond, and group 9 may be short now"
    deadline.end_group(9)
    assert (deadline.known or SharedDeadline()).tokens == 45


@pytest.mark.parametrize("fail_first", [True, False])
def test_too_few_others_determine_no_deadline_without_groups_that_were_lost(fail_first: bool) -> None:
    deadline = BatchDeadline(24)
    deadline.start_part(TERMS, leads=True)
    if not fail_first:
        deadline.lose_groups(range(12, 24))
    for number in range(9):
        deadline.end_group(number)
    if fail_first:
        deadline.lose_groups(range(12, 24))
    deadline.report([(9, 10), (10, 10), (11, 10)], [])
    assert deadline.known is None, "three groups are too few"
    deadline.restart_groups()
    deadline.report([(number, 20) for number in range(12, 23)], [])
    assert deadline.known is not None
    assert deadline.known.tokens == 30


async def test_a_replica_gets_only_the_latest_of_what_is_known() -> None:
    deadline = BatchDeadline(10)
    waiting = asyncio.create_task(deadline.next_after(None))
    await asyncio.sleep(0)
    deadline.start_part(TERMS, leads=True)
    deadline.report([(number, 10) for number in range(8)], [])
    deadline.report([(8, 10)], [])
    first = await waiting
    assert first.tokens == 15
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await deadline.next_after(first)
