"""Groups of sessions of the client, against the server's own routes with scripted turns."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
import torch

from darts_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    DartsError,
    GroupFailed,
    RunningSession,
    SessionGroup,
    SessionOver,
)
from darts_client.advantages import unbiased_advantages
from darts_client.tensors import session_tensors
from darts_server.types import Outcome, SessionEnd

from .session_servers import EVENTS, TURNS, SessionServer, serving_sessions

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]
PROMPT = [7, 8]
LONG = 100_000
"""Tokens of a turn that does not end before its session is stopped."""


@pytest.fixture(scope="module")
def server() -> Iterator[SessionServer]:
    with serving_sessions() as server:
        yield server


@pytest.fixture
async def client(server: SessionServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url) as client:
        yield client
    assert not [task for task in asyncio.all_tasks() if "darts" in task.get_name()], "no task survives its block"


async def turn(session: RunningSession, max_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """Send a turn, and return its tokens."""
    answer = await session.post("completions", {"prompt": prompt, "max_tokens": max_tokens})
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


async def two_turns(session: RunningSession, reward: float | None = None) -> float | None:
    """Generate 2 tokens, read a tool result of 1 token, and generate 3 tokens."""
    history = PROMPT + await turn(session, 2)
    await turn(session, 3, [*history, 99])
    return reward


async def run_all(group: SessionGroup, agent: Any) -> list[int]:
    """Run an agent in every session, and return their indices."""
    indices = []
    async for session in group:
        group.run(session, agent(session))
        indices.append(session.index)
    return indices


@pytest.mark.parametrize("result", [float("nan"), torch.tensor(float("inf")), 10**400])
async def test_an_agent_that_returns_no_finite_number_gets_no_reward_and_a_warning(
    client: AsyncClient, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(session: RunningSession) -> object:
        await turn(session, 2)
        return result

    async with asyncio.timeout(20), client.sessions("p", size=1, extra=0, policy="off") as group:
        await run_all(group, agent)
    assert [t.reward for t in group.trajectories] == [None]
    assert "gets no reward" in caplog.text


async def test_sessions_that_are_compared_by_seconds_have_their_places_by_seconds(client: AsyncClient) -> None:
    tokens, pauses = [30, 10, 5], [0.0, 0.4, 0.8]
    rewards = [torch.tensor(1.0), torch.tensor([1.0, 2.0]), 0.5]

    async def agent(session: RunningSession) -> object:
        await turn(session, tokens[session.index])
        await asyncio.sleep(pauses[session.index])
        return rewards[session.index]

    async with client.sessions("slow", size=3, extra=0, policy="off", measure="seconds") as group:
        await run_all(group, agent)
    assert [t.reward for t in group.trajectories] == [1.0, None, 0.5]
    [record] = await client.groups.get(group.id)
    assert [each.length for each in record.candidates] == tokens
    assert [each.rank for each in record.candidates] == [0, 1, 2]


async def test_a_group_returns_its_sessions_with_rows_rewards_and_weights(client: AsyncClient) -> None:
    async with client.sessions("p", size=2, extra=0, policy="off", metadata={"answer": 4}) as group:
        await run_all(group, lambda session: two_turns(session, session.index + 0.5))
    assert [t.index for t in group.trajectories] == [0, 1]
    assert [t.reward for t in group.trajectories] == [0.5, 1.5]
    for trajectory in group.trajectories:
        assert (trajectory.end, trajectory.turns, trajectory.tokens) == ("finished", 2, 5)
        assert (trajectory.weight, trajectory.correct, trajectory.cut) == (1.0, True, False)
        assert trajectory.trajectory_id == f"{group.id}:{trajectory.index}"
        [row] = trajectory.rows
        assert row.token_ids == [7, 8, 0, 1, 99, 0, 1, 2]
        assert row.mask == [0, 0, 1, 1, 0, 1, 1, 1]
        assert row.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5, -0.5, -0.5]
        assert sum(tokens for _, tokens in row.version_spans) == 5
    state = await client.sessions.get(group.id)
    assert (state.state, state.error) == ("completed", None)

    [record] = await client.groups.get(group.id)
    advantages = unbiased_advantages(record, [0.5, 1.5])
    rows = group.to_rows(advantages)
    assert [row["advantage"] for row in rows] == advantages
    assert [(row["index"], row["reward"], row["weight"]) for row in rows] == [(0, 0.5, 1.0), (1, 1.5, 1.0)]
    assert rows[0]["token_ids"] == [7, 8, 0, 1, 99, 0, 1, 2]
    assert [row["advantage"] for row in group.to_rows()] == [None, None]
    with pytest.raises(ValueError, match="shorter"):
        group.to_rows([1.0])


async def test_a_rewritten_history_gives_several_rows(client: AsyncClient) -> None:
    async def agent(session: RunningSession) -> None:
        await turn(session, 2)
        await turn(session, 1, [50])

    async with client.sessions(size=1, extra=0, policy="off") as group:
        await run_all(group, agent)
    rows = group.to_rows([0.25])
    assert [(row["token_ids"], row["advantage"]) for row in rows] == [([7, 8, 0, 1], 0.25), ([50, 0], 0.25)]
    assert group.trajectories[0].reward is None


@pytest.mark.parametrize("library", ["httpx", "openai"])
async def test_agents_that_lose_are_cancelled_and_send_no_further_request(
    client: AsyncClient, server: SessionServer, library: str
) -> None:
    cancelled: list[str] = []
    running: list[RunningSession] = []

    async def agent(session: RunningSession) -> float:
        running.append(session)
        llm = session.openai()
        try:
            # The shortest session is returned, and the tail's draws decide which of the others is.
            for _ in range(30 if session.index else 1):
                if library == "httpx":
                    await turn(session, 10)
                else:
                    await llm.completions.create(model="tiny", prompt=PROMPT, max_tokens=10)
        except asyncio.CancelledError:
            assert session.over.is_set()
            cancelled.append(session.id)
            raise
        return 1.0

    async with client.sessions("p", size=2, extra=2, policy="uniform") as group:
        await run_all(group, agent)
    assert [t.tokens for t in group.trajectories] == [10, 300]
    assert sum(t.weight or 0 for t in group.trajectories) == 4
    returned = [t.id for t in group.trajectories]
    over = [s for s in running if s.id not in returned]
    assert sorted(cancelled) == sorted(s.id for s in over)
    before = {s.id: server.count(TURNS, s.id) for s in over}
    await asyncio.sleep(0.1)
    assert {s.id: server.count(TURNS, s.id) for s in over} == before
    assert server.group(group.id).outcome is Outcome.COMPLETED
    ends = [session.state.end_reason for session in server.group(group.id).sessions]
    assert sorted(ends, key=str) == 2 * [SessionEnd.FINISHED] + 2 * [SessionEnd.STOPPED]
    assert server.count(EVENTS, group.id) <= 8, "a poll serves all sessions, and returns at each event at most"


async def test_an_exception_makes_a_session_unusable_and_its_replacement_runs(
    client: AsyncClient, server: SessionServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(session: RunningSession) -> int:
        await turn(session, 2)
        if session.index < 2:
            raise OSError("the sandbox is gone")
        return 1

    with caplog.at_level(logging.WARNING, "darts_client"):
        async with client.sessions("p", size=2, extra=0, policy="off") as group:
            indices = await run_all(group, agent)
    assert indices == [0, 1, 2, 3]
    assert [t.index for t in group.trajectories] == [2, 3]
    ends = [session.state.end_reason for session in server.group(group.id).sessions]
    assert ends == [SessionEnd.FAILED] * 2 + [SessionEnd.FINISHED] * 2
    assert [record.exc_text is None for record in caplog.records] == [False, False]
    assert "the sandbox is gone" in caplog.text


async def test_a_task_that_others_cancel_makes_its_session_unusable(client: AsyncClient) -> None:
    async with client.sessions(size=1, extra=0, policy="off") as group:
        async for session in group:
            task = group.run(session, two_turns(session))
            if session.index == 0:
                await asyncio.sleep(0)
                task.cancel()
    assert [t.index for t in group.trajectories] == [1]


async def test_a_group_whose_agents_all_fail_raises_an_error(client: AsyncClient) -> None:
    async def agent(session: RunningSession) -> None:
        raise OSError("no sandbox")

    with pytest.raises(GroupFailed, match="failed"):
        async with client.sessions("p", size=2, extra=0, policy="off") as group:
            await run_all(group, agent)
    assert group.trajectories == ()


@pytest.mark.parametrize("way", ["exception", "break", "cancellation"])
async def test_leaving_the_block_early_cancels_the_agents_and_deletes_the_group(
    client: AsyncClient, server: SessionServer, way: str
) -> None:
    cancelled: list[int] = []
    started: list[int] = []
    all_started = asyncio.Event()
    group = client.sessions("p", size=2, extra=1)

    async def agent(session: RunningSession) -> None:
        started.append(session.index)
        if len(started) == 3:
            all_started.set()
        try:
            await turn(session, LONG)
        except asyncio.CancelledError:
            cancelled.append(session.index)
            raise

    async def block() -> None:
        async with group:
            async for session in group:
                group.run(session, agent(session))
                if session.index < 2:
                    continue
                await all_started.wait()
                if way == "exception":
                    raise KeyError("a mistake of the trainer")
                if way == "break":
                    break

    task = asyncio.create_task(block())
    await all_started.wait()
    if way == "cancellation":
        task.cancel()
    with suppress(KeyError, asyncio.CancelledError):
        await task
    assert sorted(cancelled) == [0, 1, 2]
    assert group.trajectories == ()
    assert server.group(group.id).outcome is Outcome.CANCELLED
    ends = {session.state.end_reason for session in server.group(group.id).sessions}
    assert ends == {SessionEnd.ABORTED}


async def test_a_group_that_is_deleted_elsewhere_ends_the_loop_with_an_error(client: AsyncClient) -> None:
    async def agent(session: RunningSession) -> None:
        if session.index == 1:
            await client.sessions.delete(group.id)
        await turn(session, LONG)

    group = client.sessions("p", size=2, extra=0, policy="off")
    with pytest.raises(GroupFailed, match="cancelled"):
        async with group:
            await run_all(group, agent)


async def test_a_request_of_a_session_that_is_over_raises_an_error_of_its_own(client: AsyncClient) -> None:
    errors: list[SessionOver] = []

    async def agent(session: RunningSession) -> None:
        await turn(session, 2)
        assert (await session.state()).turns == 1
        state = await session.end(reward=0.0, metadata={"log": "none"}, finish_reason="length")
        assert (state.end, state.reward, state.correct, state.metadata) == ("finished", 0.0, False, {"log": "none"})
        try:
            await turn(session, 2)
        except SessionOver as error:
            errors.append(error)

    async with client.sessions("p", size=1, extra=0, policy="off", over_status=409) as group:
        await run_all(group, agent)
    [error] = errors
    assert (error.status_code, error.type) == (409, "darts_session_over")
    assert "finished" in str(error)


async def test_an_openai_client_is_bound_to_its_session(client: AsyncClient, server: SessionServer) -> None:
    async def agent(session: RunningSession) -> None:
        llm = session.openai()
        clients.append(llm)
        await llm.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
        await session.end(reward=2.0)
        try:
            await llm.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)

    clients: list[openai.AsyncOpenAI] = []
    statuses: list[int] = []
    async with client.sessions(size=1, extra=0, policy="off") as group:
        await run_all(group, agent)
    [trajectory] = group.trajectories
    assert (trajectory.reward, trajectory.turns) == (2.0, 1)
    assert server.count(TURNS, trajectory.id) == 2, "the refused request was not sent again"
    assert statuses == [410]
    assert clients[0].is_closed()


async def test_headers_name_the_session(client: AsyncClient) -> None:
    async with client.sessions(size=1, extra=0, policy="off") as group:
        async for session in group:
            async with httpx.AsyncClient(headers=session.headers) as http:
                url = session.base_url.partition("/darts")[0] + "/v1/completions"
                body = {"prompt": PROMPT, "max_tokens": 2}
                assert (await http.post(url, json=body)).status_code == 200
            assert (await session.end()).turns == 1


async def test_an_agent_that_has_ended_its_session_may_close_its_environment(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    async def agent(session: RunningSession) -> float:
        try:
            await two_turns(session)
            await session.end(reward=3.0)
            return 7.0
        finally:
            await asyncio.sleep(0.3)
            closed.append(session.index)

    async with client.sessions(size=2, extra=0, policy="off") as group:
        await run_all(group, agent)
    assert closed == [0, 1]
    assert [t.reward for t in group.trajectories] == [3.0, 3.0], "the returned number is no second end"

    async def hang(session: RunningSession) -> None:
        await session.end()
        await asyncio.sleep(1000)

    monkeypatch.setattr("darts_client._session_groups.CLEANUP_TIMEOUT", 0.1)
    async with client.sessions(size=2, extra=0, policy="off") as group:
        await run_all(group, hang)
    assert len(group.trajectories) == 2


async def test_a_stopped_agent_may_still_give_a_reward(client: AsyncClient, server: SessionServer) -> None:
    async def agent(session: RunningSession) -> float | None:
        try:
            await turn(session, 200 if session.index else 10)
        except asyncio.CancelledError:
            return -1.0
        return 1.0

    async with client.sessions("p", size=2, extra=2, policy="uniform") as group:
        await run_all(group, agent)
    rewards = [session.reward for session in server.group(group.id).sessions]
    assert sorted(map(str, rewards)) == ["-1.0", "-1.0", "1.0", "1.0"]


async def test_lost_connections_are_opened_again(client: AsyncClient, server: SessionServer) -> None:
    async with client.sessions(size=2, extra=0, policy="off") as group:
        sessions = [await anext(group), await anext(group)]
        await asyncio.sleep(0.1)
        server.drop_connections()
        await asyncio.sleep(0.1)
        for session in sessions:
            group.run(session, two_turns(session))
        assert await run_all(group, two_turns) == []
    assert len(group.trajectories) == 2


async def test_without_the_server_the_loop_raises_the_error() -> None:
    with serving_sessions() as server:
        client = AsyncClient(server.url, retries=0)
        group = client.sessions(size=1, extra=0, policy="off")
        await group.__aenter__()
        session = await anext(group)
        task = group.run(session, turn(session, LONG))
    async with client:
        with pytest.raises(DartsError) as caught:
            await anext(group)
        assert isinstance(caught.value, ConnectionFailed)
        await group.__aexit__(type(caught.value), caught.value, None)
    assert task.done()


async def test_wrong_uses_of_run_are_refused(client: AsyncClient) -> None:
    async with client.sessions(size=1, extra=0, policy="off") as group:
        async for session in group:
            group.run(session, two_turns(session))
            with pytest.raises(RuntimeError, match="has an agent already"):
                group.run(session, two_turns(session))
    with pytest.raises(RuntimeError, match="block of its group has ended"):
        group.run(session, two_turns(session))


def test_the_sync_client_creates_ends_and_reads_sessions(server: SessionServer) -> None:
    with Client(server.url) as client:
        created = client.sessions.create("p", size=2, extra=0, policy="off")
        for session in created.sessions:
            with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as llm:
                llm.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
            assert client.sessions.read(session.id).tokens == 3
            client.sessions.end(session.id, reward=float(session.index))
        events = client.sessions.events(created.group_id)
        assert [event.type for event in events.events] == ["started"] * 2 + ["ended"] * 2 + ["completed"]
        assert client.sessions.events(created.group_id, after=events.next).events == ()
        trajectories = client.sessions.trajectories(created.group_id)
        assert [(t.reward, t.rows[0].token_ids) for t in trajectories] == [
            (0.0, [7, 8, 0, 1, 2]),
            (1.0, [7, 8, 0, 1, 2]),
        ]
        assert client.sessions.get(created.group_id).state == "completed"


async def test_rows_become_tensors(client: AsyncClient) -> None:
    async def agent(session: RunningSession) -> None:
        await two_turns(session)
        if session.index == 1:
            await turn(session, 1, [50])

    async with client.sessions("p", size=2, extra=0, policy="off") as group:
        await run_all(group, agent)
    tensors = session_tensors(group.to_rows([0.5, -1.0]), pad_id=9)
    first = [7, 8, 0, 1, 99, 0, 1, 2]
    assert tensors.token_ids.tolist() == [first, first, [50, 0, 9, 9, 9, 9, 9, 9]]
    assert tensors.attention_mask.sum(1).tolist() == [8, 8, 2]
    generated = [0, 0, 1, 1, 0, 1, 1, 1]
    assert tensors.completion_mask.int().tolist() == [generated, generated, [0, 1, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(tensors.logprobs, -0.5 * tensors.completion_mask)
    assert tensors.advantages.tolist() == [0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="to_rows"):
        session_tensors(group.to_rows())
