"""The replica that runs a server, with a small one in place of a darts-server, and without Ray."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from darts_server.ray import process as process_module
from darts_server.ray import server as server_module
from darts_server.ray.directory import Directory
from darts_server.ray.process import ServerEnded
from darts_server.ray.server import Server
from darts_server.ray.settings import ServerSpec

pytestmark = pytest.mark.anyio
CHILD = "tests.ray.child"
SPEC = ServerSpec(["model"], host="127.0.0.1", state_dir="/state", grace=60.0, child=CHILD)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANNOUNCE_SECONDS", 0.05)


class Method:
    def __init__(self, handle: "Handle", call: Callable[..., Any]) -> None:
        self._handle = handle
        self._call = call

    async def remote(self, *arguments: Any) -> Any:
        if self._handle.is_lost:
            raise ConnectionError("it is being restarted")
        return self._call(*arguments)


class Handle:
    """A directory, as Ray Serve's handle of it calls it."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.is_lost = False

    @property
    def announce(self) -> Method:
        return Method(self, self.directory.announce)

    @property
    def leave(self) -> Method:
        return Method(self, self.directory.leave)


async def started(handle: Handle, spec: ServerSpec = SPEC) -> Server:
    """Start a replica as Ray Serve does."""
    server = Server.__new__(Server)
    await server.__init__(spec, handle)  # type: ignore[misc]  # Ray awaits it
    return server


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def process_of(server: Server) -> psutil.Process:
    assert server._process is not None
    return psutil.Process(server._process.pid)


async def test_a_replica_is_listed_when_its_server_answers_and_leaves_when_it_is_stopped() -> None:
    handle = Handle()
    server = await started(handle)
    process = process_of(server)
    assert process.cmdline()[-8:-4] == ["serve", "model", "--state-dir", "/state/replica-0"]
    await until(lambda: len(handle.directory.urls()) == 1)
    server.check_health()
    await server.stop()
    assert handle.directory.urls() == []
    assert not process.is_running()


async def test_a_replica_whose_server_died_is_unhealthy_and_leaves_at_once() -> None:
    handle = Handle()
    server = await started(handle)
    await until(lambda: len(handle.directory.urls()) == 1)
    os.kill(process_of(server).pid, signal.SIGKILL)
    await until(lambda: handle.directory.urls() == [])
    with pytest.raises(ServerEnded, match="code -9"):
        server.check_health()
    await server.stop()


async def test_a_replica_whose_server_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(process_module, "REQUEST_SECONDS", 0.5)
    server = await started(Handle())
    server.check_health()
    process_of(server).suspend()
    await until(lambda: is_unhealthy(server))
    with pytest.raises(ServerEnded, match="health requests in a row"):
        server.check_health()
    process_of(server).resume()
    await until(lambda: not is_unhealthy(server))
    await server.stop()


def is_unhealthy(server: Server) -> bool:
    try:
        server.check_health()
    except ServerEnded:
        return True
    return False


async def test_a_replica_whose_server_does_not_start_fails_and_leaves() -> None:
    handle = Handle()
    with pytest.raises(ServerEnded, match="code 3"):
        await started(handle, ServerSpec(["model", "failing"], host="127.0.0.1", child=CHILD))
    assert handle.directory.announce("next", None, None) == 0


async def test_a_replica_announces_itself_again_when_the_directory_was_restarted() -> None:
    handle = Handle()
    first, second = await started(handle), await started(handle)
    await until(lambda: len(handle.directory.urls()) == 2)
    urls = handle.directory.urls()
    handle.is_lost = True
    await asyncio.sleep(0.2)
    handle.directory, handle.is_lost = Directory(), False
    await until(lambda: handle.directory.urls() == urls)
    await first.stop()
    handle.is_lost = True
    await second.stop()  # also without a directory
