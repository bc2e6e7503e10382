"""A server as a child process, with a small one in place of a darts-server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from darts_server.ray.process import ServerEnded, ServerProcess, start_server
from tests.deploy.names import ROOT

pytestmark = pytest.mark.anyio
CHILD = "tests.ray.child"
HOST = "127.0.0.1"


@pytest.fixture
def started() -> Iterator[list[ServerProcess]]:
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        asyncio.run(server.stop(0))


def start(started: list[ServerProcess], *arguments: str) -> ServerProcess:
    started.append(start_server(arguments, HOST, CHILD))
    return started[-1]


async def test_a_server_is_waited_for_until_it_is_healthy(started: list[ServerProcess]) -> None:
    server = start(started, "slow")
    waiting = asyncio.create_task(server.wait_until_healthy())
    await answers(server)
    assert not waiting.done()
    await asyncio.to_thread(httpx.get, f"{server.url}/ready", verify=False)
    await waiting
    server.check_running()


async def test_a_server_that_exits_is_not_waited_for(started: list[ServerProcess]) -> None:
    server = start(started, "failing")
    with pytest.raises(ServerEnded, match="code 3"):
        await server.wait_until_healthy()
    with pytest.raises(ServerEnded, match="code 3"):
        server.check_running()


async def test_a_server_that_was_killed_leaves_no_process_behind(started: list[ServerProcess]) -> None:
    server = start(started)
    await server.wait_until_healthy()
    [engine] = psutil.Process(server.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    with pytest.raises(ServerEnded, match="code -9"):
        server.check_running()
    assert psutil.wait_procs([engine], timeout=60)[1] == []


@pytest.mark.parametrize("kind", ["obedient", "stubborn"])
async def test_a_server_is_stopped_and_killed_if_it_takes_too_long(started: list[ServerProcess], kind: str) -> None:
    server = start(started, kind)
    await server.wait_until_healthy()
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    await server.stop(0.5 if kind == "stubborn" else 60)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    await server.stop(60)


def test_a_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "import time; from darts_server.ray.process import start_server;"
        f"print(start_server([], {HOST!r}, {CHILD!r}).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert psutil.wait_procs([server], timeout=60)[1] == []
    engine.kill()


async def answers(server: ServerProcess) -> None:
    """Wait until it accepts connections."""
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, int(server.url.rpartition(":")[2]))
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
