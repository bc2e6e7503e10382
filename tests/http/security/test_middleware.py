"""The guard around an app of its own, spoken to as a server would."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from darts_server.exceptions import EngineDead, ServerStopping
from darts_server.http import errors
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import BodyLimits, Guard
from darts_server.serving.admission import Admission, Bounds, caller
from darts_server.serving.lifecycle import Life

pytestmark = [pytest.mark.filterwarnings("ignore:Using `httpx`"), pytest.mark.anyio]
LIMIT = 1000
HERE, ELSEWHERE = ("127.0.0.1", 1), ("192.168.1.7", 1)
KEY = {"Authorization": "Bearer one"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Guarded:
    """An app with some of vLLM's paths. ``refused``: the reasons. ``seen``: what its routes got."""

    def __init__(
        self, access: Access | None = None, unfinished: Callable[[], int] = lambda: 0, stall: float = 60.0
    ) -> None:
        self.refused: list[str] = []
        self.seen: list[str] = []
        self.app = FastAPI()
        errors.install(self.app)
        limits = BodyLimits(LIMIT, stall)
        self.life = Life()
        self.app.add_middleware(
            Guard, access=access or Access(), limits=limits, told=self.refused.append, life=self.life
        )
        admission = Admission(unfinished, 10, Bounds(most_waiting=20, most_per_caller=8))
        for path in ("/pause", "/collective_rpc"):
            self.app.add_api_route(path, self.note, methods=["POST"])
        self.app.add_api_route("/darts/v1/rewards", self.note, methods=["POST"])
        for path in ("/health", "/brand_new"):
            self.app.add_api_route(path, self.note, methods=["GET"])

        @self.app.post("/v1/completions")
        async def generate(request: Request) -> str | None:
            body = await request.json()
            admission.check(body["n"])
            with admission.held(body["n"]):
                return caller.get().name

        @self.app.post("/v1/messages")
        async def swallows(request: Request) -> None:
            try:
                admission.check((await request.json())["n"])
            except Exception as error:
                raise HTTPException(500, "something") from error

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

    async def note(self, request: Request) -> None:
        self.seen.append(request.url.path)

    def client(self, host: tuple[str, int] = HERE) -> TestClient:
        return TestClient(self.app, client=host)


def guarded_by(*keys: str, admin: tuple[str, ...] = (), **more: Any) -> Guarded:
    return Guarded(Access(Keys(keys), Keys(admin), more.pop("dangerous", False)), **more)


def test_what_is_public_asks_for_no_key() -> None:
    assert guarded_by("one", admin=("root",)).client(ELSEWHERE).get("/health").status_code == 200


def test_vllms_control_routes_are_for_admins() -> None:
    app = guarded_by("one", admin=("root",))
    assert app.client(HERE).post("/pause", headers=KEY).status_code == 403
    assert app.client(ELSEWHERE).post("/pause", headers={"Authorization": "Bearer root"}).status_code == 200
    assert Guarded().client(HERE).post("/pause").status_code == 200
    assert Guarded().client(ELSEWHERE).post("/pause").status_code == 403


def test_a_route_that_nobody_classified_is_for_admins_and_one_that_is_not_there_is_not_there() -> None:
    app = guarded_by("one")
    outside = app.client(ELSEWHERE)
    assert outside.get("/brand_new", headers=KEY).status_code == 403
    assert outside.get("/nowhere", headers=KEY).status_code == 404
    assert outside.get("/nowhere").status_code == 401
    assert outside.get("/pause", headers=KEY).status_code == 405
    assert app.client(HERE).get("/brand_new", headers=KEY).status_code == 200
    assert app.seen == ["/brand_new"]


@pytest.mark.parametrize(
    "path", ["/pause/", "//pause", "/./pause", "/%70ause", "/pause%2f", "/PAUSE", "/health/../pause"]
)
def test_no_spelling_of_a_path_gets_around_the_table(path: str) -> None:
    app = Guarded()
    app.client(ELSEWHERE).post(path)
    assert not app.seen


def test_a_prefix_of_the_whole_app_is_not_part_of_a_routes_path() -> None:
    app = Guarded()
    app.app.root_path = "/behind/a/proxy"
    assert app.client(ELSEWHERE).post("/behind/a/proxy/pause").status_code == 403
    assert app.client(HERE).post("/behind/a/proxy/pause").status_code == 200


def test_dangerous_routes_are_off_unless_allowed_and_then_for_admins() -> None:
    answer = guarded_by(admin=("root",)).client().post("/collective_rpc", headers={"Authorization": "Bearer root"})
    assert answer.status_code == 403
    assert "--allow-dangerous-routes" in answer.json()["error"]["message"]
    assert Guarded(Access(dangerous=True)).client(HERE).post("/collective_rpc").status_code == 200
    assert Guarded(Access(dangerous=True)).client(ELSEWHERE).post("/collective_rpc").status_code == 403


def test_browsers_may_ask_before_they_send_a_key() -> None:
    assert guarded_by("one").client().options("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("header", "status"),
    [(b"Bearer one", 200), (b"bearer  one ", 200), (b"Bearer", 401), (b"Bearer \xff", 401), (b"Basic one", 401)],
)
def test_a_key_comes_as_a_bearer(header: bytes, status: int) -> None:
    answer = guarded_by("one").client().post("/v1/completions", json={"n": 1}, headers={b"Authorization": header})
    assert answer.status_code == status


def test_websockets_ask_for_a_key_too() -> None:
    app = guarded_by("one")
    with app.client().websocket_connect("/v1/realtime", headers=KEY) as socket:
        assert socket.receive_text() == "here"
    with pytest.raises(WebSocketDisconnect) as refused, app.client().websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008
    assert app.refused == ["key"]


def test_requests_with_the_same_key_are_one_callers() -> None:
    app = guarded_by("one", "two", admin=("root",))

    def name(key: str) -> str | None:
        answer = app.client().post("/v1/completions", json={"n": 1}, headers={"Authorization": f"Bearer {key}"})
        found: str | None = answer.json()
        return found

    assert name("one") == name("one") != name("two")
    assert name("root") is None


# --- bodies -----------------------------------------------------------------


def chunks(size: int, count: int) -> Any:
    return (b"x" * size for _ in range(count))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"x" * (LIMIT + 1), "chunks"])
def test_a_body_that_is_too_large_is_refused_announced_or_not(path: str, body: Any) -> None:
    app = Guarded()
    answer = app.client().post(path, content=chunks(300, 4) if body == "chunks" else body)
    assert answer.status_code == 413
    assert answer.headers["Connection"] == "close"
    error = answer.json()["error"]
    assert error["type"] == "RequestTooLargeError"
    assert error["message"].startswith(f"body: at most {LIMIT} bytes are taken (--max-body-bytes)")
    assert app.refused == ["body"]


def test_the_limit_itself_is_taken() -> None:
    body = b'{"n": 1}'.ljust(LIMIT)
    answer = Guarded().client().post("/v1/completions", content=body)
    assert (answer.status_code, answer.json()) == (200, None)


def test_no_more_of_a_body_is_read_than_may_come() -> None:
    read = []

    def endless() -> Any:
        for number in range(10**6):
            read.append(number)
            yield b"x" * 100

    async def send() -> int:
        """Told the messages of a client that would send for ever."""
        status = 0

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": next(body), "more_body": True}

        async def sent(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": HERE}
        await Guarded().app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, sent)
        return status

    body = endless()
    assert asyncio.run(send()) == 413
    assert len(read) == LIMIT // 100 + 1


def test_weights_have_a_limit_of_their_own() -> None:
    answer = Guarded().client().put("/darts/v1/weights", content=chunks(300, 40))
    assert (answer.status_code, answer.json()) == (200, 12_000)


def test_a_sender_who_stands_still_is_taken_for_gone() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    async def send() -> int:
        came = aiter(content())

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(came), "more_body": True}

        async def sent(message: Any) -> None:
            statuses.append(message.get("status"))

        statuses: list[int | None] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": HERE}
        app = Guarded(stall=0.01).app
        await app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http"}, receive, sent)
        return statuses[0] or 0

    assert asyncio.run(send()) == 400


# --- load -------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_while_too_much_waits_requests_are_refused_with_a_time_to_come_back(path: str) -> None:
    waiting = [10 + 19]
    app = Guarded(unfinished=lambda: waiting[0])
    assert app.client().post(path, json={"n": 64}).status_code == 200
    waiting[0] += 1
    answer = app.client().post(path, json={"n": 1})
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) > 0
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("RateLimitError", 429, None)
    assert "20 candidates wait" in error["message"]
    assert app.refused == ["queue"]


def test_a_key_may_not_ask_for_more_at_once_than_its_share() -> None:
    app = guarded_by("one")
    answer = app.client().post("/v1/completions", json={"n": 9}, headers=KEY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert app.refused == ["quota"]
    assert app.client().post("/v1/completions", json={"n": 8}, headers=KEY).status_code == 200


# --- the end ----------------------------------------------------------------


def test_a_server_that_stops_takes_no_work_and_says_when_to_come_back() -> None:
    app = Guarded()
    app.life.end(ServerStopping("the server is stopping", 30))
    for answer in (app.client().post("/v1/completions", json={"n": 1}), app.client().get("/health")):
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "30"
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == (503, "the server is stopping")
    with pytest.raises(WebSocketDisconnect), app.client().websocket_connect("/v1/realtime"):
        pass
    assert app.refused == ["shutdown"] * 3


def test_what_it_has_done_can_still_be_asked_for_and_rewarded() -> None:
    app = Guarded()
    app.life.end(ServerStopping("the server is stopping", 30))
    assert app.client().get("/brand_new").status_code == 200
    assert app.client().post("/darts/v1/rewards").status_code == 200


def test_what_an_engine_that_died_leaves_behind_is_answered_with_its_death() -> None:
    """A request that was inside before: vLLM would answer it with 500."""
    app = Guarded()

    @app.app.post("/v1/chat/completions/batch")
    async def dies() -> None:
        assert app.life.requests == 1
        app.life.end(EngineDead("the engine died: it was killed"))
        raise HTTPException(500, "EngineCore encountered an issue")

    answer = app.client().post("/v1/chat/completions/batch")
    assert answer.status_code == 503
    assert "it was killed" in answer.json()["error"]["message"]
    assert app.life.requests == 0


def test_a_caller_is_known_by_its_own_ids() -> None:
    app = Guarded()

    @app.app.post("/v1/embeddings")
    async def tell() -> list[Any]:
        return [caller.get().request_id, caller.get().trace]

    headers = {"X-Request-Id": "mine", "traceparent": "00-1-2-01", "tracestate": "a=b"}
    told = app.client().post("/v1/embeddings", headers=headers).json()
    assert told == ["mine", {"traceparent": "00-1-2-01", "tracestate": "a=b"}]
    assert app.client().post("/v1/embeddings").json() == [None, {}]
