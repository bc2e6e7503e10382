"""The middleware around a small app, called as the web server does."""

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
from fastapi import FastAPI, HTTPException, Request, WebSocket
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from darts_server.caller import caller
from darts_server.exceptions import EngineBusy, EngineDead, ServerStopping
from darts_server.http import errors
from darts_server.http.body import BodyLimits
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import FindSessionOfKey, SecurityMiddleware
from darts_server.serving.admission import Admission, AdmissionLimits
from darts_server.serving.lifecycle import Lifecycle

pytestmark = [pytest.mark.filterwarnings("ignore:Using `httpx`"), pytest.mark.anyio]
LIMIT = 1000
HERE = ("127.0.0.1", 1)
OTHER_MACHINE = ("192.168.1.7", 1)
KEY = {"Authorization": "Bearer one"}


class App:
    """An app with some of vLLM's paths. ``refused``: reasons of refusals. ``seen``: paths that reached a route."""

    def __init__(
        self,
        access: Access | None = None,
        unfinished: Callable[[], int] = lambda: 0,
        find_session_of_key: FindSessionOfKey = lambda _: None,
    ) -> None:
        self.refused: list[str] = []
        self.seen: list[str] = []
        self.app = FastAPI()
        errors.install_handlers(self.app)
        limits = BodyLimits(LIMIT, flag="--max-body-bytes")
        self.lifecycle = Lifecycle()
        self.app.add_middleware(
            SecurityMiddleware,
            access=access or Access(),
            limits=limits,
            on_refusal=self.refused.append,
            lifecycle=self.lifecycle,
            find_session_of_key=find_session_of_key,
        )
        admission = Admission(unfinished, 10, AdmissionLimits(max_waiting=20, max_per_caller=8))
        for path in ("/pause", "/darts/v1/rewards", "/darts/v1/vote", "/darts/v1/sessions/{session_id}:end"):
            self.app.add_api_route(path, self.record, methods=["POST"])
        for path in ("/health", "/brand_new"):
            self.app.add_api_route(path, self.record, methods=["GET"])

        @self.app.post("/v1/completions")
        async def generate(request: Request) -> str | None:
            body = await request.json()
            with admission.admit(body["n"]):
                return caller.get().name

        @self.app.post("/v1/messages")
        async def hides_errors(request: Request) -> None:
            try:
                admission.admit((await request.json())["n"]).release()
            except Exception as error:
                raise HTTPException(500, "something") from error

        @self.app.post("/v1/responses")
        async def answers_in_its_own_form() -> Response:
            caller.get().answered_error = EngineBusy("the engine's queue is full", 3)
            return Response("busy", 503)

        @self.app.post("/v1/chat/completions")
        async def whole(body: dict[str, Any]) -> int:
            return len(body)

        @self.app.put("/darts/v1/weights")
        async def streamed(request: Request) -> int:
            return sum([len(chunk) async for chunk in request.stream()])

        @self.app.websocket("/v1/realtime")
        async def realtime(websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text("here")
            await websocket.close()

    async def record(self, request: Request) -> None:
        self.seen.append(request.url.path)

    def client(self, host: tuple[str, int] | None = HERE) -> TestClient:
        return TestClient(self.app, "http://127.0.0.1:8000", client=host)  # type: ignore[arg-type]  # None: without an address


def app_with_keys(*keys: str, admin: tuple[str, ...] = ()) -> App:
    return App(Access(Keys(keys), Keys(admin)))


def test_callers_elsewhere_or_without_an_address_may_not_change_the_server_and_the_error_names_the_remedy() -> None:
    for host in (OTHER_MACHINE, None):
        answer = App().client(host).post("/pause")
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["type"] == "PermissionDeniedError"
        assert "POST /pause" in error["message"]
        assert "--admin-api-key-file" in error["message"]


def test_a_route_missing_in_the_table_is_for_admins_and_an_unknown_path_is_404() -> None:
    app = app_with_keys("one")
    outside = app.client(OTHER_MACHINE)
    assert outside.get("/brand_new", headers=KEY).status_code == 403
    assert outside.get("/nowhere", headers=KEY).status_code == 404
    assert outside.get("/nowhere").status_code == 401
    assert outside.get("/pause", headers=KEY).status_code == 405
    assert app.client(HERE).get("/brand_new", headers=KEY).status_code == 200
    assert app.seen == ["/brand_new"]


@pytest.mark.parametrize(
    "path", ["/pause/", "//pause", "/./pause", "/%70ause", "/pause%2f", "/PAUSE", "/health/../pause"]
)
def test_no_spelling_of_a_path_bypasses_the_table(path: str) -> None:
    app = App()
    app.client(OTHER_MACHINE).post(path)
    assert not app.seen


def test_the_apps_root_path_is_not_part_of_a_routes_path() -> None:
    app = App()
    app.app.root_path = "/behind/a/proxy"
    assert app.client(OTHER_MACHINE).post("/behind/a/proxy/pause").status_code == 403
    assert app.client(HERE).post("/behind/a/proxy/pause").status_code == 200


@pytest.mark.parametrize("forwarded", ["X-Forwarded-For", "x-forwarded-host", "Forwarded", "X-Real-IP", "Via"])
def test_requests_through_a_proxy_are_not_from_this_machine(forwarded: str) -> None:
    """uvicorn may have replaced the address by a header's, and a proxy on this machine forwards others' requests."""
    app = App()
    assert app.client(HERE).post("/pause", headers={forwarded: "127.0.0.1"}).status_code == 403
    assert app.client(HERE).get("/health", headers={forwarded: "127.0.0.1"}).status_code == 200
    assert app.seen == ["/health"]


def test_a_websocket_is_closed_with_at_most_123_bytes_of_the_reason() -> None:
    app = App()
    app.lifecycle.stop(ServerStopping("ä" * 100, 30))
    with pytest.raises(WebSocketDisconnect) as closed, app.client().websocket_connect("ws://127.0.0.1/v1/realtime"):
        pass
    assert closed.value.reason == "ä" * 61


def test_without_keys_the_server_answers_to_its_own_names_alone() -> None:
    app = App()
    for path in ("/brand_new", "/nowhere"):
        answer = app.client().get(path, headers={"Host": "example.com"})
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    with pytest.raises(WebSocketDisconnect), app.client().websocket_connect("ws://example.com/v1/realtime"):
        pass
    assert app.client().get("/health", headers={"Host": "example.com"}).status_code == 200
    assert app.seen == ["/health"]
    assert app.refused == ["permission"] * 3


def test_without_keys_web_pages_of_other_sites_start_no_work_and_report_no_rewards() -> None:
    app = App()
    page = {"Origin": "https://example.com"}
    for path in ("/v1/completions", "/darts/v1/rewards"):
        assert app.client().post(path, json={"n": 1}, headers=page).status_code == 403
    with pytest.raises(WebSocketDisconnect), app.client().websocket_connect("ws://127.0.0.1/v1/realtime", headers=page):
        pass
    assert app.client().post("/darts/v1/rewards", headers={"Origin": "http://localhost:3000"}).status_code == 200
    assert app.seen == ["/darts/v1/rewards"]


def test_with_a_valid_key_the_server_answers_to_every_name_and_page() -> None:
    """Callers behind a proxy use its name. A web page has a key only if its user has given the page a key."""
    elsewhere = {"Host": "rollouts.example.com", "Origin": "https://app.example.com"}
    app = app_with_keys("one", "two", admin=("root",))
    names = []
    for key in ("one", "two", "root", "one"):
        headers = {**elsewhere, "Authorization": f"Bearer {key}"}
        answer = app.client(OTHER_MACHINE).post("/v1/completions", json={"n": 1}, headers=headers)
        assert answer.status_code == 200
        names.append(answer.json())
    assert names[0] == names[3]
    assert len({None, *names}) == 4, "each key is a caller of its own"
    only_admins = app_with_keys(admin=("root",))
    assert only_admins.client().post("/v1/completions", json={"n": 1}, headers=elsewhere).status_code == 403


@pytest.mark.parametrize(
    ("header", "status"),
    [(b"Bearer one", 200), (b"bearer  one ", 200), (b"Bearer", 401), (b"Bearer \xff", 401), (b"Basic one", 401)],
)
def test_a_key_is_sent_as_bearer_token(header: bytes, status: int) -> None:
    answer = app_with_keys("one").client().post("/v1/completions", json={"n": 1}, headers={b"Authorization": header})
    assert (answer.status_code, answer.headers.get("WWW-Authenticate")) == (status, "Bearer" if status == 401 else None)
    assert app_with_keys("one").client().options("/v1/completions").status_code == 405, "a preflight needs none"


def test_websockets_need_a_key_too() -> None:
    app = app_with_keys("one")
    with app.client().websocket_connect("/v1/realtime", headers=KEY) as socket:
        assert socket.receive_text() == "here"
    with pytest.raises(WebSocketDisconnect) as refused, app.client().websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008
    assert app.refused == ["key"]


# --- bodies -----------------------------------------------------------------


def chunks(size: int, count: int) -> Any:
    return (b"x" * size for _ in range(count))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"x" * (LIMIT + 1), "chunks"])
def test_a_too_large_body_is_refused_whether_announced_or_not(path: str, body: Any) -> None:
    app = App()
    answer = app.client().post(path, content=chunks(300, 4) if body == "chunks" else body)
    assert answer.status_code == 413
    assert answer.headers["Connection"] == "close"
    error = answer.json()["error"]
    assert error["type"] == "RequestTooLargeError"
    assert error["message"].startswith(f"body: must have at most {LIMIT} bytes (--max-body-bytes)")
    assert app.refused == ["body"]


def test_a_body_of_the_maximum_size_is_accepted_and_weights_have_their_own_limit() -> None:
    answer = App().client().post("/v1/completions", content=b'{"n": 1}'.ljust(LIMIT))
    assert (answer.status_code, answer.json()) == (200, None)
    answer = App().client().put("/darts/v1/weights", content=chunks(300, 40))
    assert (answer.status_code, answer.json()) == (200, 12_000)


async def test_a_body_is_not_read_beyond_the_limit() -> None:
    read = list[int]()
    statuses = list[int | None]()

    async def receive() -> dict[str, Any]:
        read.append(len(read))
        return {"type": "http.request", "body": b"x" * 100, "more_body": len(read) < 1000}

    async def sent(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": HERE}
    await App().app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, sent)
    assert statuses[0] == 413
    assert len(read) == LIMIT // 100 + 1


# --- load -------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_while_too_many_candidates_wait_requests_are_refused_with_retry_after(path: str) -> None:
    waiting = [10 + 19]
    app = App(unfinished=lambda: waiting[0])
    assert app.client().post(path, json={"n": 1}).status_code == 200
    waiting[0] += 1
    answer = app.client().post(path, json={"n": 1})
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) > 0
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("RateLimitError", 429, None)
    assert "20 candidates wait" in error["message"]
    assert app.refused == ["queue"]


def test_a_request_beyond_the_quota_of_its_key_is_invalid() -> None:
    app = app_with_keys("one")
    answer = app.client().post("/v1/completions", json={"n": 9}, headers=KEY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert app.refused == ["quota"]
    assert app.client().post("/v1/completions", json={"n": 8}, headers=KEY).status_code == 200
    # The route answers in its own form, with our headers.
    answer = app.client().post("/v1/responses", headers=KEY)
    assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (503, "busy", "3")


def test_a_request_that_is_refused_half_way_holds_nothing_afterwards() -> None:
    app = app_with_keys("one")
    admission = Admission(lambda: 0, 10, AdmissionLimits(max_per_caller=8))

    async def output() -> AsyncIterator[None]:
        yield

    async def start_both() -> None:
        outputs = []
        # The second prompt is refused, and the output of the first is never iterated.
        for _ in range(2):
            ticket = admission.admit(5)
            outputs.append(output())
            finalize(outputs[-1], ticket.release)

    @app.app.post("/v1/messages/count_tokens")
    async def answers_errors_itself() -> Response:
        with suppress(ValueError):
            await start_both()
        return Response(status_code=400)

    assert app.client().post("/v1/messages/count_tokens", headers=KEY).status_code == 400
    gc.collect()
    assert (admission.unanswered_requests, admission.not_in_engine) == (0, 0)


# --- shutdown ----------------------------------------------------------------


def test_a_stopping_server_refuses_work_with_retry_after_but_returns_results_and_accepts_rewards() -> None:
    app = App()
    app.lifecycle.stop(ServerStopping("the server is stopping", 30))
    for answer in (app.client().post("/v1/completions", json={"n": 1}), app.client().get("/health")):
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "30"
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == (503, "the server is stopping")
    with pytest.raises(WebSocketDisconnect), app.client().websocket_connect("ws://127.0.0.1/v1/realtime"):
        pass
    assert app.refused == ["shutdown"] * 3
    for path in ("/darts/v1/vote", "/darts/v1/rollouts"):
        assert app.client().post(path).status_code == 503
    assert app.client().get("/brand_new").status_code == 200, "results"
    assert app.client().post("/darts/v1/rewards").status_code == 200


def test_requests_in_flight_when_the_engine_dies_get_its_error() -> None:
    """vLLM would answer such a request with 500."""
    app = App()

    @app.app.post("/v1/chat/completions/batch")
    async def dies() -> None:
        assert app.lifecycle.requests == 1
        app.lifecycle.stop(EngineDead("the engine died: it was killed"))
        raise HTTPException(500, "EngineCore encountered an issue")

    answer = app.client().post("/v1/chat/completions/batch")
    assert answer.status_code == 503
    assert "it was killed" in answer.json()["error"]["message"]
    assert app.lifecycle.requests == 0


def test_a_callers_request_id_is_recorded() -> None:
    app = App()

    @app.app.post("/v1/embeddings")
    async def respond() -> str | None:
        return caller.get().request_id

    assert app.client().post("/v1/embeddings", headers={"X-Request-Id": "mine"}).json() == "mine"
    assert app.client().post("/v1/embeddings").json() is None


def test_the_key_of_a_session_opens_its_own_paths_until_the_key_that_created_it_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    keys = Keys(file=file)
    owner = keys.find_name(b"one")

    def find_session_of_key(key: bytes) -> tuple[str | None, str] | None:
        return (owner, "ses-1") if key == b"ses-key-1" else None

    client = App(Access(keys), find_session_of_key=find_session_of_key).client()
    headers = {"Authorization": "Bearer ses-key-1"}
    answer = client.post("/v1/completions", json={"n": 1}, headers=headers)
    assert (answer.status_code, answer.json()) == (200, owner)
    assert client.post("/darts/v1/sessions/ses-1:end", headers=headers).status_code == 200
    for path in ("/darts/v1/sessions/ses-11:end", "/darts/v1/sessions/ses-2:end", "/pause", "/darts/v1/vote"):
        assert client.post(path, headers=headers).status_code == 403, path
    file.write_text("two")
    keys.reload()
    assert client.post("/v1/completions", json={"n": 1}, headers=headers).status_code == 401
    assert client.post("/darts/v1/sessions/ses-1:end", headers=headers).status_code == 401


def test_the_key_of_a_session_may_be_in_anthropics_header_and_other_keys_may_not() -> None:
    keys = Keys(["one"])
    owner = keys.find_name(b"one")
    client = App(
        Access(keys), find_session_of_key=lambda key: (owner, "ses-1") if key == b"ses-key-1" else None
    ).client()

    def status(path: str = "/v1/completions", **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post(path, json={"n": 1}, headers=named).status_code

    assert status(x_api_key="ses-key-1") == 200
    assert status("/darts/v1/vote", x_api_key="ses-key-1") == 403
    assert status(x_api_key="one") == 401
    assert status(x_api_key="ses-key-2") == 401
    # The header Authorization decides if it is sent.
    assert status(x_api_key="ses-key-1", authorization="Bearer two") == 401
    assert status(x_api_key="ses-key-1", authorization="Basic two") == 401
    assert status(x_api_key="ses-key-2", authorization="Bearer ses-key-1") == 200


def test_a_stopping_server_takes_the_ends_of_sessions_but_no_turns() -> None:
    app = App()
    app.lifecycle.stop(ServerStopping("stopping", 30))
    client = app.client()
    assert client.post("/darts/v1/sessions/ses-1:end").status_code == 200
    assert client.post("/v1/completions", json={"n": 1}).status_code == 503
    assert client.post("/darts/v1/vote").status_code == 503
