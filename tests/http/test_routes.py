import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from threading import get_ident

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from darts_server.exceptions import Overloaded
from darts_server.http.routes import MAX_PENDING, PAUSE_FACTOR, SharedAnswers, share_answers
from darts_server.types import FinishReason
from tests.http.serving import client
from tests.rollout.learned.test_prompts import FINISHED, record

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")


@pytest.fixture(scope="module")
def opened() -> Iterator[TestClient]:
    with client() as opened:
        yield opened


def test_provenance_has_every_candidates_length_reason_and_rank(opened: TestClient) -> None:
    [group] = opened.get("/darts/v1/groups/cmpl-a-0").json()["groups"]
    assert (group["group_size"], group["outcome"], group["generated"], group["returned"]) == (2, "completed", 60, 30)
    assert [(c["length"], c["selected_as"], c["reason"], c["rank"]) for c in group["candidates"]] == [
        (10, "short", None, 0),
        (20, "short", None, 1),
        (30, None, "longer_than_needed", None),
    ]
    assert group["candidates"][0]["weight_version_start"] == 3


def test_a_responses_id_gives_all_its_groups(opened: TestClient) -> None:
    groups = opened.get("/darts/v1/groups/cmpl-a").json()["groups"]
    assert [g["group_id"] for g in groups] == ["cmpl-a-0", "cmpl-a-1"]


def test_a_prompts_statistics_are_found_by_the_key_of_its_groups(opened: TestClient) -> None:
    key = opened.get("/darts/v1/groups/cmpl-a-0").json()["groups"][0]["prompt_key"]
    stats = opened.get(f"/darts/v1/prompts/{key}").json()
    assert (stats["estimated_mean_tokens"], stats["estimated_std_tokens"]) == (20, 10)
    assert (stats["groups"], stats["candidates"]) == (2, 6)


def test_a_prompts_statistics_separate_counts_from_estimates() -> None:
    ended = [replace(FINISHED[0], index=i, tokens=96, finish_reason=FinishReason.LENGTH) for i in range(4)]
    with client(known={"truncated": replace(record(*ended), max_tokens=96, prompt_tokens=7)}) as opened:
        stats = opened.get("/darts/v1/prompts/truncated").json()
    assert stats["estimated_mean_tokens"] > 96
    assert (stats["mean_generated_tokens"], stats["max_tokens"], stats["prompt_tokens"]) == (96, 96, 7)
    assert (stats["finished"], stats["truncated"], stats["stopped"]) == (0, 4, 0)


def test_counts_that_an_earlier_version_did_not_keep_are_null() -> None:
    with client(known={"old": None}) as opened:
        stats = opened.get("/darts/v1/prompts/old").json()
    assert stats["estimated_mean_tokens"] == 20
    names = ("mean_generated_tokens", "finished", "truncated", "stopped", "max_tokens", "prompt_tokens")
    assert [stats[name] for name in names] == [None] * len(names)


@pytest.mark.parametrize("path", ["prompts/gsm8k%2F7", "prompts/gsm8k/7"])
def test_a_callers_own_prompt_key_may_have_slashes(opened: TestClient, path: str) -> None:
    assert opened.get(f"/darts/v1/{path}").json()["prompt_key"] == "gsm8k/7"


@pytest.mark.parametrize("path", ["groups/none", "prompts/none", "prompts/none/of/them"])
def test_missing_groups_and_prompts_are_404_in_openais_form(opened: TestClient, path: str) -> None:
    answer = opened.get(f"/darts/v1/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert answer.json()["error"]["param"] in ("group_id", "prompt_key")


def test_gauges_are_read_in_the_event_loop() -> None:
    registry = CollectorRegistry()
    threads: list[int] = []

    def read() -> float:
        threads.append(get_ident())
        return 1.0

    Gauge("shown", "What the loop changes.", registry=registry).set_function(read)
    application = FastAPI()
    Instrumentator(registry=registry).expose(application)
    share_answers(application)

    @application.get("/loop")
    async def loop() -> int:
        return get_ident()

    with TestClient(application) as client:
        assert "shown 1.0" in client.get("/metrics").text
        assert threads == [client.get("/loop").json()]


class Counted:
    """An app whose answer is the number of its answers. Each answer takes 5 ms of the event loop."""

    def __init__(self) -> None:
        self.answers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.answers += 1
        time.sleep(0.005)
        await receive()
        await PlainTextResponse(str(self.answers))(scope, receive, send)


async def ask(app: SharedAnswers, query: bytes = b"", **headers: str) -> str:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        for _, value in message.get("headers", []):
            assert value != b"of another"
        if "headers" in message:
            # Middleware adds headers.
            message["headers"].append((b"x", b"of another"))
        sent.append(message)

    async def never() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    raw = [(name.encode().replace(b"_", b"-"), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": "GET", "path": "/a", "query_string": query, "headers": raw}, never, send)
    return bytes(sent[1]["body"]).decode()


@pytest.mark.anyio
async def test_requests_that_wait_together_share_an_answer_and_later_requests_get_new_answers() -> None:
    app = SharedAnswers(counted := Counted(), varies=False)
    asked = (ask(app, b"%d" % number, accept=str(number)) for number in range(100))
    assert set(await asyncio.gather(*asked)) == {"1"}, "neither query nor header makes a difference"
    assert [await ask(app) for _ in range(3)] == ["2", "3", "4"]
    assert counted.answers == 4


@pytest.mark.anyio
async def test_requests_for_different_answers_share_none() -> None:
    app = SharedAnswers(Counted(), varies=True)
    asked = [ask(app), ask(app, b"name[]=a"), ask(app, accept="text/plain"), ask(app, accept_encoding="gzip")]
    assert sorted(await asyncio.gather(*asked, ask(app))) == ["1", "1", "2", "3", "4"]


@pytest.mark.anyio
async def test_many_requests_leave_most_of_the_time_to_other_work() -> None:
    app = SharedAnswers(Counted(), varies=True)
    begin = time.monotonic()
    await asyncio.gather(*(ask(app, b"%d" % number) for number in range(5)))
    assert time.monotonic() - begin > 4 * PAUSE_FACTOR * 0.005


@pytest.mark.anyio
async def test_the_number_of_pending_answers_is_limited() -> None:
    app = SharedAnswers(counted := Counted(), varies=True)
    asked = (ask(app, b"%d" % number) for number in range(100))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 100 - MAX_PENDING
    assert counted.answers == MAX_PENDING


def test_the_description_is_rendered_once_and_outside_of_the_event_loop() -> None:
    application = FastAPI()
    threads: list[int] = []
    schema = application.openapi

    def openapi() -> dict[str, object]:
        threads.append(get_ident())
        return schema()

    application.openapi = openapi  # type: ignore[method-assign]

    @application.get("/loop")
    async def loop() -> int:
        return get_ident()

    with TestClient(application) as client:
        plain = client.get("/openapi.json")
        share_answers(application)
        threads.clear()
        for _ in range(3):
            shared = client.get("/openapi.json")
            assert shared.content == plain.content
            assert shared.headers == plain.headers
        assert client.head("/openapi.json").status_code == 200
        # FastAPI's own route calls it again, and gets the cached result.
        assert len(threads) == 2
        assert threads[0] != client.get("/loop").json()
