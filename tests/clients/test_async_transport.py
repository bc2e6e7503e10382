import httpx
import pytest

from darts_client import ConnectionFailed
from darts_client._async_transport import AsyncTransport
from darts_client._requests import TransportOptions
from darts_client._sync_transport import Transport


def test_a_path_before_v1_is_kept() -> None:
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200)

    transport = Transport("https://proxy/darts/v1", None, TransportOptions(1.0), httpx.MockTransport(handle))
    transport.send("GET", "/health")
    assert seen == ["https://proxy/darts/health"]


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def test_the_error_of_a_refused_connection_names_the_request() -> None:
    transport = Transport("http://server", None, TransportOptions(1.0), httpx.MockTransport(refuse))
    with pytest.raises(ConnectionFailed, match="POST /v1/completions: ConnectError: refused"):
        transport.send("POST", "/v1/completions")


@pytest.mark.anyio
async def test_the_error_of_a_refused_connection_names_the_request_async() -> None:
    transport = AsyncTransport("http://server", None, TransportOptions(1.0), httpx.MockTransport(refuse))
    with pytest.raises(ConnectionFailed, match="POST /v1/completions: ConnectError: refused"):
        await transport.send("POST", "/v1/completions")
