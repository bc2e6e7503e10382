import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from darts_client import Client, ConnectionFailed, NotFound, Unauthorized

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


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (404, NotFound)])
def test_waiting_ends_at_once_on_other_errors(status: int, kind: type[Exception]) -> None:
    start = time.monotonic()
    with (
        Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(status))) as client,
        pytest.raises(kind),
    ):
        client.wait_until_healthy(60)
    assert time.monotonic() - start < 10


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
