"""What the fuzzer finds in a server with a known fault, and what it sends."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from darts_server.http.security.heads import LimitedHttp
from darts_server.offline.demo.server import Server
from darts_server.store.archive import pack
from faults import rude
from faults.fuzz import Answer, Failure, Fuzzer, Step, check_answer, mutated
from tests.clients.servers import listening

Handler = Callable[[FastAPI, str, bytes], None]
"""Gets path and body of each request; raises where the server has its fault."""
DESCRIPTION = {
    "openapi": "3.1.0",
    "info": {"title": "fake", "version": "1"},
    "paths": {"/darts/v1/live": {"get": {"responses": {"200": {"description": "all is well"}}}}},
    "components": {"schemas": {"CompletionRequest": {"properties": {"seed": {"type": "integer"}}}}},
}
ANYTHING = {"groups": [{"trajectories": [{}] * 4}] * 2, "state": "serving", "intact": True}


class ThisProcess:
    """The fake server runs in a thread, so it never exits."""

    pid, returncode = os.getpid(), 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


@contextmanager
def fake_server(handle: Handler, log: Path, protocol: type[asyncio.Protocol] = LimitedHttp) -> Iterator[Server]:
    """Run a server without an engine that accepts everything."""
    app = FastAPI(openapi_url=None)
    app.state.started = 0

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def answer(path: str, request: Request) -> Response:
        match request.method, path:
            case "GET", "openapi.json":
                return JSONResponse(DESCRIPTION)
            case "GET", "metrics":
                return PlainTextResponse(f"darts_candidates_started_total {app.state.started}\n")
            case "GET", "darts/v1/state":
                return Response(pack([("prompt", "a", "{}")]))
        try:
            handle(app, path, await request.body())
        except KeyError:
            return JSONResponse({"error": {"message": "internal", "code": 500}}, status_code=500)
        return JSONResponse(ANYTHING)

    log.write_text("")
    with listening(app, protocol) as listener:
        yield Server(ThisProcess(), int(listener.url.rpartition(":")[2]), log)


@pytest.fixture(autouse=True)
def slow_machine_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server shares its process with the fuzzer, so on a busy machine it answers late without a fault."""
    monkeypatch.setattr("faults.fuzz.HEALTH_SECONDS", 30.0)
    monkeypatch.setattr("faults.fuzz.SERVED_SECONDS", 30.0)


def fuzz(handle: Handler, folder: Path, requests: int = 200) -> tuple[bool, Fuzzer]:
    with Fuzzer(lambda log: fake_server(handle, log), folder) as fuzzer:
        return fuzzer.run(1, requests), fuzzer


def test_an_internal_error_is_found_and_printed_as_one_command_with_the_seed(tmp_path: Path) -> None:
    def fail(app: FastAPI, path: str, body: bytes) -> None:
        if b"1e400" in body and path.startswith("darts/v1/"):
            raise KeyError

    survived, fuzzer = fuzz(fail, tmp_path, 5_000)
    assert not survived
    heading, what, *commands = fuzzer.report.splitlines()
    assert "--seed" in heading
    assert "/darts/v1/" in what
    assert "status {500}" in what
    assert len(commands) == 1
    # A large body is in a file that the command names.
    in_file = re.search(r"@(\S+)", commands[0])
    body = commands[0] if in_file is None else Path(in_file[1]).read_text(encoding="utf-8")
    assert "1e400" in body


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["large URL", "large header", "many headers", "large trailer"])
async def test_heads_without_a_limit_are_found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rude, "ANSWER_SECONDS", 1.0)
    step = Step(rude.RUDE, name, name)
    with fake_server(lambda app, path, body: None, tmp_path / "log") as server:
        check_answer(Answer(step, status=await rude.call(server.url, name)), is_disrupted=False)
    with fake_server(lambda app, path, body: None, tmp_path / "log", HttpToolsProtocol) as server:
        status = await rude.call(server.url, name)
    with pytest.raises(Failure, match=f"RUDE {name} status"):
        check_answer(Answer(step, status=status), is_disrupted=False)


@pytest.mark.anyio
async def test_a_key_that_is_not_served_during_a_flood_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rude, "FLOOD_SECONDS", 0.1)
    seen: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return httpx.Response(429)

    async def is_served() -> bool:
        return served

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://here") as client:
        for served in (True, False):
            status = await rude.flood(client, is_served)
            assert status == (200 if served else None)
            step = Answer(Step(rude.RUDE, rude.FLOOD, rude.FLOOD), status=status)
            if served:
                check_answer(step, is_disrupted=False)
            else:
                with pytest.raises(Failure, match="while another one floods"):
                    check_answer(step, is_disrupted=False)
    assert set(seen) == {f"Bearer {rude.FLOODING_KEY}"}


@pytest.mark.nightly
def test_a_candidate_that_never_ends_is_found_and_another_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faults.fuzz.IDLE_SECONDS", 0.05)

    def lose(app: FastAPI, path: str, body: bytes) -> None:
        app.state.started += path == "resume"

    survived, fuzzer = fuzz(lose, tmp_path, 5_000)
    assert not survived
    # On a busy machine the example is sent twice.
    assert re.search("[12] candidates have not ended", fuzzer.report)
    assert fuzzer.report.count("curl") == 1
    assert len(list(tmp_path.glob("server-*.log"))) > 1


def test_hostile_values_are_sent_as_they_are() -> None:
    body = {"a": [1, {"b": 2}]}
    assert mutated(body, [(0, "", None)]) == "null"
    assert mutated(body, [(4, "", "$number")]) == '{"a": [1, {"b": 1e400}]}'
    assert mutated(body, [(3, "c", "\ud800")]) == '{"a": [1, {"b": 2, "c": "\\ud800"}]}'
    assert len(mutated(body, [(1, "", "$deep")])) > 200_000
    assert body == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize(
    ("route", "status", "text", "is_disrupted", "found"),
    [
        ("/darts/v1/vote", 200, "{}", False, None),
        ("/darts/v1/vote", 400, '{"error": {"message": "no"}}', False, None),
        ("/darts/v1/vote", 400, '{"detail": "no"}', False, "without an error object"),
        ("/darts/v1/vote", 200, '{"a": NaN}', False, "is no JSON"),
        ("/darts/v1/vote", 503, '{"error": {"message": "paused"}}', True, None),
        ("/darts/v1/vote", 503, '{"error": {"message": "paused"}}', False, "status {503}"),
        ("/v1/completions", 200, '{"error": {"message": "inside a stream", "code": 500}}', True, "status {500}"),
        ("/pause", 500, '{"error": {"message": "of vLLM"}}', False, None),
    ],
)
def test_answers_are_checked(route: str, status: int, text: str, is_disrupted: bool, found: str | None) -> None:
    response: Any = httpx.Response(status, headers={"Content-Type": "application/json"})
    answer = Answer(Step("POST", route, route), status=status, text=text, response=response)
    if found is None:
        check_answer(answer, is_disrupted)
    else:
        with pytest.raises(Failure) as failure:
            check_answer(answer, is_disrupted)
        assert found in failure.value.kind
