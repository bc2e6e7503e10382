import httpx

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
