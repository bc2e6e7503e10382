import httpx
import pytest

from darts_client import ConnectionFailed
from darts_client._connection import AsyncConnection, Connection, auth_headers, root_url
from darts_client._retries import Patience

BASE_URLS = ["http://server", "http://server/", "http://server/v1", "http://server/v1/"]


@pytest.mark.parametrize("base_url", BASE_URLS)
def test_the_root_is_found_with_or_without_v1(base_url: str) -> None:
    assert root_url(base_url) == "http://server"


def test_a_path_before_v1_is_kept() -> None:
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200)

    Connection("https://proxy/darts/v1", None, Patience(1.0), httpx.MockTransport(handle)).send("GET", "/health")
    assert seen == ["https://proxy/darts/health"]


def test_a_url_without_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="localhost:8000"):
        root_url("localhost:8000")


def test_the_key_is_a_bearer_token() -> None:
    assert auth_headers("secret") == {"Authorization": "Bearer secret"}
    assert auth_headers(None) == {}


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def test_a_refused_connection_names_the_request() -> None:
    with pytest.raises(ConnectionFailed, match="POST /v1/completions: ConnectError: refused"):
        Connection("http://server", None, Patience(1.0), httpx.MockTransport(refuse)).send("POST", "/v1/completions")


@pytest.mark.anyio
async def test_a_refused_connection_names_the_request_async() -> None:
    with pytest.raises(ConnectionFailed, match="POST /v1/completions: ConnectError: refused"):
        await AsyncConnection("http://server", None, Patience(1.0), httpx.MockTransport(refuse)).send(
            "POST", "/v1/completions"
        )
