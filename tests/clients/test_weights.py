"""Sent weights, over recording transports and to the server's own routes over a socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterable, Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save

from darts_client import AsyncClient, BadRequest, Client, ConnectionFailed, Overloaded, TimedOut
from darts_client._io import PIECE_SIZE
from darts_server.exceptions import UpdateFailed
from darts_server.weights.coordinator import State
from darts_server.weights.updates import Updates
from tests.weights.model import SHAPES, FakeModel, tensors, write

from .vllm_answers import URL

LARGE = bytes(range(256)) * (2 * PIECE_SIZE // 256) + b"end"
WEIGHTS = {"version": 8, "state": "serving", "rule": "finish", "last": None, "last_error": None}


class Recorder(httpx.BaseTransport):
    """Records bodies piece by piece, and raises ``errors`` for the first bodies after they were read."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.requests: list[httpx.Request] = []
        self.bodies: list[list[bytes]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, Iterable)
        self.requests.append(request)
        self.bodies.append(list(request.stream))
        if self.errors:
            raise self.errors.pop(0)
        return httpx.Response(200, json=WEIGHTS)

    def received_only(self, data: bytes) -> bool:
        """Return whether each body is this data, with its size as Content-Length and in small pieces."""
        sizes = {request.headers["content-length"] for request in self.requests}
        small = all(len(piece) <= PIECE_SIZE for body in self.bodies for piece in body)
        return sizes == {str(len(data))} and small and all(b"".join(body) == data for body in self.bodies)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.safetensors"
    path.write_bytes(LARGE)
    return path


def test_the_check_of_numbers_is_switched_off_in_the_request_alone() -> None:
    server = Recorder()
    with Client(URL, transport=server) as client:
        client.weights.push(b"weights")
        client.weights.push(b"weights", check_finite=False)
        client.weights.push_lora("a", b"weights", config={"r": 1}, check_finite=False)
        client.weights.load("a.safetensors", check_finite=False)
        client.weights.load_lora("a", "folder", check_finite=False)
    default, *pushed = (request.url.params.get("check_finite") for request in server.requests[:3])
    assert (default, pushed) == (None, ["false", "false"])
    assert [json.loads(b"".join(body))["check_finite"] for body in server.bodies[3:]] == [False, False]


def test_a_repeated_version_is_in_the_request_if_it_is_allowed() -> None:
    server = Recorder()
    with Client(URL, transport=server) as client:
        client.weights.load("a.safetensors", version=0)
        client.weights.load("a.safetensors", version=0, repeat_version=True)
    bodies = [json.loads(b"".join(body)) for body in server.bodies]
    assert [body.get("repeat_version") for body in bodies] == [None, True]


def test_a_file_is_sent_unchanged_in_pieces(large: Path) -> None:
    server = Recorder()
    with Client(URL, transport=server) as client:
        for source in (large, str(large), LARGE):
            assert client.weights.push(source).version == 8
    assert server.received_only(LARGE)
    assert [len(body) for body in server.bodies] == [3, 3, 3]
    for path in (large.parent, large.parent / "nothing"):
        with Client(URL, transport=server) as client, pytest.raises(OSError, match=path.name):
            client.weights.push(path)
    assert {(request.method, request.url.path) for request in server.requests} == {("PUT", "/darts/v1/weights")}


def test_a_push_is_retried_from_its_beginning_only_if_it_was_never_sent(large: Path) -> None:
    server = Recorder(httpx.ConnectError("refused"))
    with Client(URL, transport=server) as client:
        client.weights.push(large)
    assert len(server.bodies) == 2
    assert server.received_only(LARGE)
    server = Recorder(httpx.ReadTimeout("slow"), httpx.ReadError("reset"))
    with Client(URL, transport=server) as client:
        with pytest.raises(TimedOut, match="slow"):
            client.weights.push(large)
        with pytest.raises(ConnectionFailed, match="reset"):
            client.weights.load("large")
    assert len(server.bodies) == 2


class Stalled(httpx.AsyncBaseTransport):
    """Reads one piece of a body, and then no more."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, AsyncIterable)
        async for _ in request.stream:
            self.started.set()
            await asyncio.Event().wait()
        raise AssertionError("it had only one piece")


def is_open(path: Path) -> bool:
    """Return whether this process has the file open."""
    return path in {link.resolve() for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.anyio
async def test_a_cancelled_push_closes_its_file(large: Path) -> None:
    server = Stalled()
    async with AsyncClient(URL, transport=server) as client:
        push = asyncio.create_task(client.weights.push(large))
        await server.started.wait()
        assert is_open(large)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        async with asyncio.timeout(5):
            while is_open(large):
                await asyncio.sleep(0.01)


def test_the_server_applies_the_options_that_are_sent(url: str, model: FakeModel, tmp_path: Path) -> None:
    with Client(url) as client:
        assert client.weights.get().last is None
        record = client.weights.push(save(tensors(5)), rule="keep", version=7)
        assert model.values == dict.fromkeys(SHAPES, 5)
        assert (record.version, record.last and record.last.rule) == (7, "keep")
        assert client.weights.push(write(tmp_path / "six.safetensors", 6)).version == 8
        assert model.values == dict.fromkeys(SHAPES, 6)
        client.weights.push(write(tmp_path / "first.safetensors", 7, "layers.0.weight"), partial=True)
        write(tmp_path / "second.safetensors", 8, "layers.1.weight")
        record = client.weights.load(Path("second.safetensors"), rule="keep", version=12, partial=True)
    assert model.values == {**dict.fromkeys(SHAPES, 6), "layers.0.weight": 7, "layers.1.weight": 8}
    assert record.last is not None
    assert (record.version, record.last.source, record.last.rule, record.last.partial) == (12, "disk", "keep", True)


def test_refusals_are_received_while_the_body_is_still_being_sent(
    url: str, updates: Updates, model: FakeModel, large: Path
) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"8"
        while updates.coordinator.state is not State.STAGING:
            time.sleep(0.001)
        with pytest.raises(BadRequest, match="an update by push is in progress") as busy:
            client.weights.push(large)
        assert busy.value.status_code == 409
        yield b"9"

    with Client(url) as client:
        with pytest.raises(BadRequest, match="not a whole safetensors file"):
            client.weights.push_stream(pieces(), 2)
        model.fail["load"] = [UpdateFailed("broken")]
        with pytest.raises(Overloaded, match="broken"):
            client.weights.push(save(tensors(5)))
        record = client.weights.get()
    assert (record.version, record.state, record.last_error) == (0, "serving", "broken")


def test_a_lora_adapter_is_sent_with_its_configuration_without_target_modules(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(LARGE)
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    server = Recorder()
    with Client(URL, transport=server) as client:
        client.weights.push_lora("a", tmp_path, rule="keep")
        client.weights.push_lora("a", LARGE, config={"r": 8, "lora_alpha": 16})
        with pytest.raises(ValueError, match="config: the bytes of an adapter need a configuration"):
            client.weights.push_lora("a", LARGE)
    assert server.received_only(LARGE)
    assert [json.loads(request.url.params["config"]) for request in server.requests] == [{"r": 8, "lora_alpha": 16}] * 2
    assert {(request.method, request.url.path) for request in server.requests} == {("PUT", "/darts/v1/weights/lora/a")}
