import inspect
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from darts_client import AsyncClient, Client, ConnectionFailed, NotFound, Overloaded, TimedOut, Unauthorized

from .vllm_answers import MODELS, URL, full_completion


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


def test_completions_are_one_request_with_groups_in_prompt_order() -> None:
    server = Recorder()
    with Client(URL, model="tiny", transport=httpx.MockTransport(server)) as client:
        groups = client.completions([[1], [2]], group_size=3, max_tokens=16, policy="off", top_p=0.9)
    assert [group.prompt_token_ids for group in groups] == [(1,), (2,)]
    assert [group.lengths for group in groups] == [(1, 2, 3), (1, 2, 3)]
    [request] = server.requests
    assert request.headers["X-Darts-Policy"] == "off"
    assert json.loads(request.content)["top_p"] == 0.9


def test_the_default_model_is_looked_up_once() -> None:
    server = Recorder()
    with Client(URL, transport=httpx.MockTransport(server)) as client:
        for _ in range(2):
            client.completions("a", group_size=1, max_tokens=16)
    assert [request.url.path for request in server.requests] == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert json.loads(server.requests[-1].content)["model"] == "tiny"


def test_threads_that_start_at_once_look_the_model_up_once() -> None:
    server = Recorder()
    with Client(URL, transport=httpx.MockTransport(server)) as client, ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: client.completions("a", group_size=1, max_tokens=16), range(5)))
    assert [request.url.path for request in server.requests].count("/v1/models") == 1


def test_a_model_named_in_the_call_overrides_the_default() -> None:
    server = Recorder()
    with Client(URL, model="tiny", transport=httpx.MockTransport(server)) as client:
        client.completions("a", group_size=1, max_tokens=16, model="tiny:raw")
    assert [json.loads(request.content)["model"] for request in server.requests] == ["tiny:raw"]


def test_the_api_key_is_sent() -> None:
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


def test_waiting_ends_when_the_server_is_healthy() -> None:
    answers = iter([503, 200])
    with Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(next(answers)))) as client:
        client.wait_until_healthy(60)
    assert next(answers, None) is None


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (404, NotFound)])
def test_waiting_ends_at_once_on_other_errors(status: int, kind: type[Exception]) -> None:
    start = time.monotonic()
    with (
        Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(status))) as client,
        pytest.raises(kind),
    ):
        client.wait_until_healthy(60)
    assert time.monotonic() - start < 10


METHODS = [
    "health",
    "wait_until_healthy",
    "models",
    "metrics",
    "completions",
    "rollouts",
    "stream_tokens",
    "rewards",
    "vote",
    "cancel",
]


@pytest.mark.parametrize("name", METHODS)
def test_both_clients_take_the_same_arguments(name: str) -> None:
    sync, asynchronous = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
    assert sync.parameters == asynchronous.parameters


def test_a_completion_is_retried_only_if_it_was_not_sent() -> None:
    methods: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        if len(methods) == 1:
            raise httpx.ConnectError("refused", request=request)
        raise httpx.ReadError("reset", request=request)

    with (
        Client(URL, model="tiny", transport=httpx.MockTransport(handle)) as client,
        pytest.raises(ConnectionFailed, match="reset"),
    ):
        client.completions("a", group_size=1, max_tokens=16)
    assert methods == ["POST", "POST"]


def test_without_retries_a_request_is_sent_once() -> None:
    methods: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        raise httpx.ConnectError("refused", request=request)

    with (
        Client(URL, retries=0, transport=httpx.MockTransport(handle)) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.models()
    assert methods == ["GET"]


def test_timeouts_are_passed_to_httpx() -> None:
    server = Recorder()
    with Client(URL, timeout=70, connect_timeout=7, transport=httpx.MockTransport(server)) as client:
        client.models()
    assert server.requests[0].extensions["timeout"] == {"connect": 7, "read": 70, "write": 70, "pool": 70}
