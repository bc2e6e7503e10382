import inspect
import json
import time

import httpx
import pytest

from darts_client import AsyncClient, Client, ConnectionFailed, NotFound, Overloaded, TimedOut, Unauthorized

from .answers import MODELS, URL, full_completion


def serve(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json=MODELS)
    if request.url.path == "/v1/completions":
        return httpx.Response(200, json=full_completion(json.loads(request.content)))
    return httpx.Response(200)


class Recorder:
    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return serve(request)


def test_groups_come_in_prompt_order_from_one_request() -> None:
    server = Recorder()
    with Client(URL, model="tiny", transport=httpx.MockTransport(server)) as client:
        groups = client.completions([[1], [2]], group_size=3, max_tokens=16, policy="off", top_p=0.9)
    assert [group.prompt_token_ids for group in groups] == [(1,), (2,)]
    assert [group.lengths for group in groups] == [(1, 2, 3), (1, 2, 3)]
    [request] = server.requests
    assert request.headers["X-Darts-Policy"] == "off"
    assert json.loads(request.content)["top_p"] == 0.9


def test_the_first_model_is_looked_up_once() -> None:
    server = Recorder()
    with Client(URL, transport=httpx.MockTransport(server)) as client:
        for _ in range(2):
            client.completions("a", group_size=1, max_tokens=16)
    assert [request.url.path for request in server.requests] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert json.loads(server.requests[-1].content)["model"] == "tiny"


def test_a_model_named_in_the_call_wins() -> None:
    server = Recorder()
    with Client(URL, model="tiny", transport=httpx.MockTransport(server)) as client:
        client.completions("a", group_size=1, max_tokens=16, model="tiny:raw")
    assert [json.loads(request.content)["model"] for request in server.requests] == ["tiny:raw"]


def test_the_key_is_sent() -> None:
    server = Recorder()
    with Client(URL, api_key="secret", transport=httpx.MockTransport(server)) as client:
        client.health()
        assert client.models() == ["tiny", "tiny:raw"]
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret"}


def test_an_unhealthy_server_is_an_error() -> None:
    with Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(503))) as client:
        with pytest.raises(Overloaded):
            client.health()
        with pytest.raises(TimedOut, match="HTTP 503"):
            client.wait_until_healthy(0)


def test_waiting_ends_with_health() -> None:
    answers = iter([503, 200])
    with Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(next(answers)))) as client:
        client.wait_until_healthy(0.01)
    assert next(answers, None) is None


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (404, NotFound)])
def test_waiting_ends_at_once_where_it_cannot_help(status: int, kind: type[Exception]) -> None:
    began = time.monotonic()
    with (
        Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(status))) as client,
        pytest.raises(kind),
    ):
        client.wait_until_healthy(60)
    assert time.monotonic() - began < 10


METHODS = ["health", "wait_until_healthy", "models", "completions", "rollouts", "stream_tokens", "rewards", "cancel"]


@pytest.mark.parametrize("name", METHODS)
def test_both_clients_take_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
    assert ours.parameters == theirs.parameters


def test_what_was_not_taken_is_asked_again_and_what_may_have_been_is_not() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        if len(asked) == 1:
            raise httpx.ConnectError("refused", request=request)
        raise httpx.ReadError("reset", request=request)

    with (
        Client(URL, model="tiny", transport=httpx.MockTransport(handle)) as client,
        pytest.raises(ConnectionFailed, match="reset"),
    ):
        client.completions("a", group_size=1, max_tokens=16)
    assert asked == ["POST", "POST"]


def test_no_retries_is_one_try() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        raise httpx.ConnectError("refused", request=request)

    with (
        Client(URL, retries=0, transport=httpx.MockTransport(handle)) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.models()
    assert asked == ["GET"]


def test_each_time_has_its_place() -> None:
    server = Recorder()
    with Client(URL, timeout=70, connect_timeout=7, transport=httpx.MockTransport(server)) as client:
        client.models()
    assert server.requests[0].extensions["timeout"] == {"connect": 7, "read": 70, "write": 70, "pool": 70}
