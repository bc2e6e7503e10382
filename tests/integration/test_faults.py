"""An engine that dies, and a server that is stopped while it starts; each with a server of its own."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from darts_server.demo.server import DARTS, ENVIRONMENT, FLAGS, Launch, Server, launch
from tests.integration.fork_server import Serve
from tests.integration.waiting import engine_processes, wait_started

pytestmark = pytest.mark.engine
LONG = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 300, "ignore_eos": True}


async def in_flight(server: Server, client: httpx.AsyncClient, count: int) -> list[asyncio.Task[httpx.Response]]:
    url = f"{server.url}/v1/completions"
    posts = (client.post(url, json=LONG | {"stream": bool(i % 2)}) for i in range(count))
    tasks = [asyncio.create_task(post) for post in posts]
    await asyncio.to_thread(wait_started, server, 12 * count)
    return tasks


@pytest.mark.anyio
async def test_a_killed_engine_fails_all_requests_and_ends_the_server_with_an_error(
    serve: Serve, tmp_path: Path
) -> None:
    few_at_a_time = ("--max-num-seqs", "2")  # no group completes before the engine is killed
    with serve(DARTS, tmp_path / "log", *few_at_a_time) as server:
        async with httpx.AsyncClient(timeout=240) as client:
            requests = await in_flight(server, client, 8)
            for child in engine_processes(server):
                os.kill(child, signal.SIGKILL)
            began = time.monotonic()
            answers = await asyncio.gather(*requests, return_exceptions=True)
        assert time.monotonic() - began < 120
        for number, answer in enumerate(answers):
            assert isinstance(answer, httpx.Response), answer
            if number % 2:
                assert "error" in answer.text
                assert '"code": 5' in answer.text
            else:
                assert answer.status_code == 503, answer.text[:2000]
                assert "was killed (SIGKILL)" in answer.json()["error"]["message"]
        with suppress(httpx.TransportError):  # the server has exited already
            assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.process.wait(180) == 1, server.log_tail()
    [last] = [line for line in server.log.read_text().splitlines() if " CRITICAL " in line]
    assert "the engine died: EngineCore was killed (SIGKILL)" in last


@pytest.mark.parametrize("spawned", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_server_stops_on_sigterm_while_its_engine_starts(forks: Launch, tmp_path: Path, spawned: bool) -> None:
    log = tmp_path / "log"
    command = [*DARTS, *FLAGS, "--port", "0", "--worker-extension-cls", "tests.integration.never_ready.Extension"]
    process = (launch if spawned else forks)(command, log, ENVIRONMENT | os.environ)
    try:
        while "the engine starts" not in log.read_text():
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.1)
        engine = psutil.Process(process.pid).children(recursive=True)
        assert len(engine) >= 2
        process.terminate()
        assert process.wait(180) == 128 + signal.SIGTERM
        assert psutil.wait_procs(engine, timeout=240)[1] == []
    finally:
        process.send_signal(signal.SIGKILL)
