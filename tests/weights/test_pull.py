import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.serving.gate import Gate
from darts_server.weights.pull import MAX_REDIRECTS, AllowedHosts, stream_url
from darts_server.weights.staging import Staging
from darts_server.weights.updates import UpdateOptions, Updates
from tests.weights.harness import Harness
from tests.weights.model import SHAPES, tensors

pytestmark = pytest.mark.anyio

HOSTS = AllowedHosts(frozenset({"trainer:8001", "other", "[::1]"}))
URL = "http://trainer:8001/w"
Answer = Callable[[httpx.Request], httpx.Response]


async def got(answer: Answer, url: str = URL, limit: int = 100) -> bytes:
    chunks = stream_url(HOSTS, url, limit, httpx.MockTransport(answer))
    return b"".join([chunk async for chunk in chunks])


async def in_pieces() -> AsyncIterator[bytes]:
    yield b"wei"
    yield b"ghts"


@pytest.mark.parametrize(
    "url", ["http://trainer:8001/w", "http://other/w", "https://other:9/w?step=3", "http://[::1]:7/w"]
)
def test_a_host_is_allowed_on_any_port_or_on_one(url: str) -> None:
    assert str(HOSTS.check(url)) == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://trainer/w", "is of trainer:80, and weights are pulled only from"),
        ("http://trainer:8002/w", "trainer:8002"),
        ("http://trainer:8001.evil/w", "is no URL"),
        ("http://evil/trainer:8001", "is of evil:80"),
        ("http://trainer:8001@evil/w", "no name or password"),
        ("http://me:secret@trainer:8001/w", "no name or password"),
        ("file:///etc/passwd", "must be http"),
        ("/w", "must be http"),
        ("", "must be http"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        HOSTS.check(url)
    assert error.value.field == "url"
    assert "secret" not in str(error.value)


def test_by_default_no_host_is_allowed() -> None:
    with pytest.raises(Forbidden, match="--weights-hosts"):
        AllowedHosts().check(URL)


async def test_bytes_are_streamed_without_credentials_or_decoding() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        assert "authorization" not in request.headers
        return httpx.Response(200, content=in_pieces())

    assert await got(answer) == b"weights"


@pytest.mark.parametrize("is_announced", [True, False])
async def test_more_bytes_than_the_limit_are_refused(is_announced: bool) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 50

    answer = httpx.Response(200, headers={"content-length": "101"} if is_announced else {}, content=endless())
    with pytest.raises(InvalidRequest, match="has more than 100 bytes"):
        await got(lambda _: answer)


async def test_an_error_status_is_reported() -> None:
    with pytest.raises(InvalidRequest, match="answered 404 Not Found"):
        await got(lambda _: httpx.Response(404))


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("cut")]
)
async def test_a_failed_transfer_is_an_invalid_request(error: httpx.HTTPError) -> None:
    def fails(_: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(InvalidRequest, match=r"could not be pulled: (refused|ReadTimeout|cut)"):
        await got(fails)


async def test_redirects_on_the_same_host_are_followed() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/w":
            return httpx.Response(302, headers={"location": "/there"})
        return httpx.Response(200, content=in_pieces())

    assert await got(answer) == b"weights"


@pytest.mark.parametrize("to", ["http://evil/w", "http://other/w", "https://trainer:8001/w", "http://trainer/w"])
async def test_redirects_to_other_hosts_are_refused(to: str) -> None:
    with pytest.raises(InvalidRequest, match="redirects to another host"):
        await got(lambda _: httpx.Response(302, headers={"location": to}))


async def test_too_many_redirects_are_refused() -> None:
    count = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal count
        count += 1
        return httpx.Response(302, headers={"location": "/w"})

    with pytest.raises(InvalidRequest, match="more than 5 redirects"):
        await got(answer)
    assert count == MAX_REDIRECTS + 1


async def served(content: bytes, cut: int) -> tuple[asyncio.Server, str]:
    """Start a server that announces all of ``content`` and sends all but the last ``cut`` bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content[: len(content) - cut])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("cut", [0, 1])
async def test_pulled_weights_are_checked_and_served_like_pushed_ones(
    harness: Harness, tmp_path: Path, cut: int
) -> None:
    server, name = await served(save(tensors(5)), cut)
    async with server:
        with Staging(tmp_path) as staging:
            updates = Updates(harness.model, Gate(), staging, hosts=AllowedHosts(frozenset({name})))
            if cut:
                with pytest.raises(InvalidRequest, match="could not be pulled"):
                    await updates.pull(f"http://{name}/w", UpdateOptions())
                assert harness.model.values == dict.fromkeys(SHAPES, 0)
                assert list(tmp_path.glob("darts-weights-*/*.safetensors")) == []
            else:
                record = await updates.pull(f"http://{name}/w", UpdateOptions())
                assert record is not None
                assert record.source == "http"
                assert harness.model.values == dict.fromkeys(SHAPES, 5)
