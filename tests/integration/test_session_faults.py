"""Sessions on a server that is paused, drains or loses its engine, and harnesses that leave."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.test_sessions import LONG, create, end, read
from tests.integration.waiting import engine_processes

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(serve_one: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("faults") / "log"
    with serve_one(DARTS, log, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:  # has /pause
        yield running


def run_long(session: dict[str, Any], *, stream: bool = False, tokens: int = 300) -> httpx.Response:
    url = f"{session['base_url']}/completions"
    body = {**LONG, "max_tokens": tokens, "stream": stream}
    return httpx.post(url, json=body, timeout=PATIENCE)


def wait_for_tokens(server: Server, session: dict[str, Any], tokens: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while read(server, session)["tokens"] < tokens:
        assert time.monotonic() < deadline


def stream_events(server: Server, group: dict[str, Any]) -> str:
    url = f"{server.url}/darts/v1/session-groups/{group['group_id']}/events"
    return httpx.get(url, headers={"Accept": "text/event-stream"}, timeout=PATIENCE).text


def control(server: Server, path: str) -> None:
    assert httpx.post(f"{server.url}{path}", timeout=PATIENCE).status_code == 200


def delete(server: Server, group: dict[str, Any]) -> None:
    url = f"{server.url}/darts/v1/session-groups/{group['group_id']}"
    assert httpx.delete(url, timeout=PATIENCE).json()["state"] == "cancelled"


@pytest.mark.parametrize("over_status", [410, 200])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_at_a_closed_gate_is_answered_when_its_session_ends(
    server: Server, stream: bool, over_status: int
) -> None:
    group = create(server, size=2, extra=0, policy="off", over_status=over_status)
    first, second = group["sessions"]
    control(server, "/pause?mode=wait")
    try:
        with ThreadPoolExecutor(2) as pool:
            turns = [pool.submit(run_long, session, stream=stream) for session in (first, second)]
            while sum(read(server, session)["running_turns"] for session in (first, second)) < 2:
                pass
            # One session is ended by its harness, the other by the server.
            end(server, first)
            delete(server, group)
            answers = [turn.result(5.0) for turn in turns]
    finally:
        control(server, "/resume")
    for answer in answers:
        assert answer.status_code == (200 if stream else over_status)
        # A harness that understands no error gets an answer without tokens.
        expected = "darts_session_over" if over_status == 410 else '"finish_reason":"abort"'
        assert expected in answer.text
    assert server.count_requests() == 0
    assert [read(server, session)["tokens"] for session in (first, second)] == [0, 0]


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_stop_reaches_a_paused_engine(server: Server, mode: str) -> None:
    group = create(server, size=1, extra=0, policy="off")
    (session,) = group["sessions"]
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(run_long, session)
        wait_for_tokens(server, session, 2)
        control(server, f"/pause?mode={mode}")
        try:
            assert read(server, session)["state"] == "open"
            delete(server, group)
            answer = turn.result(5.0).json()
        finally:
            control(server, "/resume")
    assert answer["choices"][0]["finish_reason"] == "abort"
    # An update that aborts all requests ends no session: its harness may send the turn again.
    assert answer["darts_session"]["state"] == ("over" if mode == "keep" else "open")
    assert answer["darts_session"]["turns"] == 0


def test_all_turns_of_a_deleted_group_end_at_once(server: Server) -> None:
    group = create(server, size=8, extra=4)
    with ThreadPoolExecutor(12) as pool:
        turns: list[Future[httpx.Response]] = []
        for session in group["sessions"]:
            turns.append(pool.submit(run_long, session, stream=session["index"] % 2 == 0))
        wait_for_tokens(server, group["sessions"][0], 1)
        delete(server, group)
        delete(server, group)
        answers = [turn.result(PATIENCE) for turn in turns]
    for answer in answers:
        if answer.status_code == 200:
            assert '"finish_reason":"abort"' in answer.text
        else:
            assert answer.status_code == 410
    assert server.metric("darts_sessions_open") == 0
    for session in group["sessions"]:
        assert read(server, session)["running_turns"] == 0


def test_many_long_polls_hear_of_an_event_and_of_none_that_they_have(server: Server) -> None:
    group = create(server, size=2, extra=0, policy="off")
    url = f"{server.url}/darts/v1/session-groups/{group['group_id']}/events"
    with (
        httpx.Client(limits=httpx.Limits(max_connections=100), timeout=PATIENCE) as client,
        ThreadPoolExecutor(100) as pool,
    ):
        polls = [pool.submit(client.get, url, params={"after": 2}) for _ in range(99)]
        early = pool.submit(client.get, url, params={"after": 10**6, "wait": 2})
        time.sleep(1.0)
        end(server, group["sessions"][0])
        for poll in polls:
            body = poll.result().json()
            assert [event["type"] for event in body["events"]] == ["ended"]
            assert body["next"] == 3
        assert early.result().json() == {"events": [], "next": 10**6}
    delete(server, group)


def test_a_server_that_drains_finishes_turns_and_tells_harnesses(serve_one: Serve, tmp_path: Path) -> None:
    with serve_one(DARTS, tmp_path / "log") as server:
        complete_group = create(server, size=1, extra=0, policy="off")
        (busy,) = complete_group["sessions"]
        open_group = create(server, size=2, extra=0, policy="off")
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(stream_events, server, group) for group in (complete_group, open_group)]
            turn = pool.submit(run_long, busy)
            wait_for_tokens(server, busy, 2)
            os.kill(server.process.pid, signal.SIGTERM)
            while run_long(open_group["sessions"][0], tokens=1).status_code == 200:
                pass
            refused = run_long(open_group["sessions"][0])
            assert refused.status_code == 503
            assert "stopping" in refused.text
            # What a harness knows about its session is still taken.
            assert end(server, open_group["sessions"][1], reward=1.0)["reward"] == 1.0
            assert turn.result(PATIENCE).json()["choices"][0]["finish_reason"] == "length"
            # The server may have ended already.
            with suppress(httpx.TransportError):
                end(server, busy, reward=1.0)
            events = [stream.result(PATIENCE) for stream in streams]
        assert server.process.wait(PATIENCE) == 0
    assert "event: completed" in events[0] or "event: cancelled" in events[0]
    assert "event: cancelled" in events[1]
    assert "the server is stopping" in events[1]


def test_a_killed_engine_ends_the_groups_of_sessions_with_its_server(serve_one: Serve, tmp_path: Path) -> None:
    with serve_one(DARTS, tmp_path / "log") as server:
        group = create(server, size=2, extra=0, policy="off")
        session = group["sessions"][0]
        with ThreadPoolExecutor(3) as pool:
            stream = pool.submit(stream_events, server, group)
            turns = [pool.submit(run_long, session, stream=streams) for streams in (False, True)]
            wait_for_tokens(server, session, 2)
            for engine in engine_processes(server):
                engine.kill()
            answers = [turn.result(PATIENCE) for turn in turns]
            events = stream.result(PATIENCE)
        assert server.process.wait(PATIENCE) == 1
    assert answers[0].status_code == 503
    assert "the engine died" in answers[1].text
    assert "event: cancelled" in events
    assert "the engine died" in events
