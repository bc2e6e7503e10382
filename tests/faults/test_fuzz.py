"""What the fuzzer finds in a server with a known fault, and the requests that it makes."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from darts_server.demo.server import Server
from faults.fuzz.fuzzer import ROUND_REQUESTS, Fuzzer, Tally
from faults.fuzz.request import Example
from faults.fuzz.request import Request as Sent
from faults.fuzz.routes import example_of, operations
from faults.fuzz.session import Answer, Session, Violation
from faults.fuzz.values import HOSTILE, How, Mutation, Raw, encode, mutated
from faults.fuzz.watch import HealthWatch


@pytest.fixture(autouse=True)
def little_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faults.fuzz.fuzzer.SHRINK_SECONDS", 3.0)


Handler = Callable[[Any], None]
"""Gets the parsed body of each request; raises or sleeps where the server has its fault."""


class Refused(Exception):
    """The body is invalid."""


class ThisProcess:
    """The fake server runs in a thread, so it never exits."""

    pid, returncode = os.getpid(), 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


class Fake:
    """A target without an engine. ``started``: candidates that never end."""

    def __init__(self, url: str, folder: Path, app: FastAPI) -> None:
        log = folder / "log"
        log.write_text("")
        self.server, self.root, self.app = Server(ThisProcess(), int(url.rpartition(":")[2]), log), folder, app
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1
        self.app.state.started = 0


def fake_app(handle: Handler) -> FastAPI:
    app = FastAPI()
    app.state.started = 0

    async def body_of(request: Request) -> Any:
        try:
            body = json.loads(await request.body())
            handle(body)
        except (ValueError, RecursionError) as error:
            raise Refused from error
        return body

    @app.exception_handler(Refused)
    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 400
        return JSONResponse({"error": {"message": "invalid", "code": status}}, status_code=status)

    @app.post("/darts/v1/rollouts")
    async def rollouts(request: Request) -> Any:
        await body_of(request)
        return {"groups": [{"trajectories": [{"trajectory_id": "a:0"}] * 4}]}

    @app.post("/darts/v1/vote")
    async def vote(request: Request) -> Any:
        await body_of(request)
        return {"trajectories": [{"trajectory_id": "a:0"}]}

    @app.post("/darts/v1/rewards")
    async def rewards(request: Request) -> Any:
        await body_of(request)
        return {"matched": 1}

    @app.get("/darts/v1/policy")
    async def policy() -> Any:
        return {"policy": "uniform", "policies": []}

    @app.get("/darts/v1/state")
    async def state() -> Response:
        return Response(b"state")

    @app.get("/health")
    async def health() -> Any:
        return {}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(f"darts_candidates_started_total {app.state.started}\n")

    for route in ("rollouts", "vote"):
        _describe(app, f"/darts/v1/{route}")
    return app


def _describe(app: FastAPI, path: str) -> None:
    body = {"application/json": {"schema": {"type": "object", "properties": {"seed": {"type": "integer"}}}}}
    app.openapi()["paths"][path]["post"]["requestBody"] = {"content": body}


@contextmanager
def fake(handle: Handler, folder: Path) -> Iterator[Fake]:
    app = fake_app(handle)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Fake(f"http://127.0.0.1:{listening.getsockname()[1]}", folder, app)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def fuzz(handle: Handler, folder: Path, requests: int = 400) -> tuple[Tally, Fake]:
    with fake(handle, folder) as target, Fuzzer(target, folder, changes=False) as fuzzer:
        return fuzzer.run(1, requests), target


def is_wrong(body: Any) -> bool:
    """Return whether a sampling parameter is neither a number nor true: a fault that a server might have."""
    sampling = body.get("sampling") if isinstance(body, dict) else None
    return isinstance(sampling, dict) and not all(isinstance(value, int) for value in sampling.values())


def test_a_server_without_faults_survives(tmp_path: Path) -> None:
    tally, target = fuzz(lambda _: None, tmp_path)
    assert tally.survived, tally.failures
    assert tally.requests >= 400
    assert not target.restarts


def test_an_internal_error_is_found_and_shrunk_to_one_request(tmp_path: Path) -> None:
    def fail(body: Any) -> None:
        if is_wrong(body):
            raise KeyError("sampling")

    tally, _ = fuzz(fail, tmp_path, 200)
    assert not tally.survived
    found = tally.failures[0]
    assert found.violation.kind == "status 500"
    assert found.is_reproduced
    [command] = found.commands
    assert "curl" in command
    assert '"sampling"' in command
    assert f"--seed {found.seed}" in str(found)


def test_a_seed_repeats_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fuzzer, "_shrunk", lambda self, round_seed, drawn, failing, violation: failing)

    def fail(body: Any) -> None:
        if is_wrong(body):
            raise KeyError("sampling")

    [first, *_] = fuzz(fail, tmp_path, 200)[0].failures
    with fake(fail, tmp_path) as target, Fuzzer(target, tmp_path, changes=False) as fuzzer:
        again = fuzzer.run(first.seed, ROUND_REQUESTS).failures
    # Which failure of a round comes first depends on callers that leave, and so on time.
    assert first.violation in [failure.violation for failure in again]


def test_a_seed_repeats_what_is_sent_and_what_is_sent_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Sequence[Example]] = []
    send = Session.run

    async def record(session: Session, examples: Sequence[Example]) -> list[Violation]:
        batches.append(examples)
        return await send(session, examples)

    monkeypatch.setattr(Session, "run", record)
    fuzz(lambda _: None, tmp_path, 100)
    first = batches.copy()
    batches.clear()
    fuzz(lambda _: None, tmp_path, 100)
    assert batches == first
    assert max(map(len, batches)) > 10


def test_a_failure_that_takes_two_examples_is_found_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_together(session: Session, examples: Sequence[Example]) -> list[Violation]:
        session.answers = [[Answer(request) for request in example] for example in examples]
        routes = {request.route for example in examples for request in example}
        is_failure = len(examples) > 1 and {"/darts/v1/vote", "/darts/v1/rewards"} <= routes
        return [Violation("status 500", "POST /darts/v1/vote", "both")] if is_failure else []

    with fake(lambda _: None, tmp_path) as target, Fuzzer(target, tmp_path, changes=False) as fuzzer:
        monkeypatch.setattr(Session, "run", fail_together)
        [failure] = fuzzer.run(1, 100).failures
    assert failure.is_reproduced
    assert failure.commands.count(") &") == 2
    assert any("/vote" in command for command in failure.commands)
    assert any("/rewards" in command for command in failure.commands)


def test_a_stall_is_seen(tmp_path: Path) -> None:
    def stall(body: Any) -> None:
        time.sleep(0.7)

    with fake(stall, tmp_path) as target, HealthWatch(target.server.url, os.getpid()) as health:
        time.sleep(0.2)
        assert health.longest() < 0.5
        httpx.post(f"{target.server.url}/darts/v1/rollouts", json={})
        time.sleep(0.3)  # a poll that still waits counts now, and again when it is answered
        assert health.longest() > 0.3
        time.sleep(0.5)
        assert health.longest() < 0.5


def test_a_candidate_that_never_ends_is_found_and_the_server_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faults.bystanders.IDLE_SECONDS", 0.05)
    holder: list[Fake] = []

    def lose(body: Any) -> None:
        if is_wrong(body):
            holder[0].app.state.started += 1

    with fake(lose, tmp_path) as target, Fuzzer(target, tmp_path, changes=False) as fuzzer:
        holder.append(target)
        tally = fuzzer.run(1, 400)
    assert tally.count("unbalanced")
    [found, *_] = [each for each in tally.failures if each.violation.kind == "unbalanced"]
    assert len(found.commands) == 1
    assert target.restarts


def test_hostile_values_are_sent_as_they_are() -> None:
    texts = [encode(value) for value in HOSTILE]
    assert {"null", "NaN", "1e400", str(2**64 - 1), str(10**400), '"\\ud800"', '"\\n"'} <= set(texts)
    assert encode({"a": [Raw("01"), None]}) == '{"a":[01,null]}'


@pytest.mark.parametrize(
    ("mutation", "expected"),
    [
        (Mutation(How.REPLACE, 1, 0, 0), b'{"a":null,"b":[2]}'),
        (Mutation(How.DELETE, 1, 0, 0), b'{"b":[2]}'),
        (Mutation(How.ADD, 0, 0, 0), b'{"a":1,"b":[2],"seen":null}'),
        (Mutation(How.WRAP, 1, 0, 0), b'{"a":[1],"b":[2]}'),
        (Mutation(How.REPEAT, 3, 0, 0), b'{"a":1,"b":[2,2]}'),
        (Mutation(How.CUT, 5, 0, 0), b'{"a":'),
    ],
)
def test_a_mutation_changes_one_thing(mutation: Mutation, expected: bytes) -> None:
    assert mutated({"a": 1, "b": [2]}, [mutation], ["seen"]) == expected


def test_a_route_that_has_no_body_here_gets_one_from_its_schema() -> None:
    schema = {"$ref": "#/components/schemas/New"}
    new = {
        "type": "object",
        "required": ["name", "sizes"],
        "properties": {
            "name": {"type": "string"},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": 3}},
            "more": {"anyOf": [{"type": "object", "properties": {"inner": {}}}, {"type": "null"}]},
        },
    }
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    description = {"paths": {"/darts/v1/new": {"post": operation}}, "components": {"schemas": {"New": new}}}
    [found] = operations(description)
    assert found.body == {"name": "a", "sizes": [3]}
    assert {"name", "sizes", "more", "inner"} == set(found.fields)
    assert example_of(new, description) == found.body


def test_a_long_body_is_printed_as_a_file(tmp_path: Path) -> None:
    request = Sent("POST", "/a", "/a?b=1", (("X-A", "it's"),))
    assert request.curl("http://h", b"{}", tmp_path / "body").endswith("-H 'X-A: it'\"'\"'s' --data-binary '{}'")
    assert request.curl("http://h", b"x" * 10_000, tmp_path / "body").endswith(f"@{tmp_path / 'body'}")
    assert (tmp_path / "body").read_bytes() == b"x" * 10_000


def test_the_fake_server_is_described(tmp_path: Path) -> None:
    with fake(lambda _: None, tmp_path) as target:
        description = httpx.get(f"{target.server.url}/openapi.json").json()
    assert {operation.path for operation in operations(description)} >= {"/darts/v1/rollouts", "/darts/v1/vote"}
