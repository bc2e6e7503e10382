"""Servers of their own: an engine that dies, flags that make seeds unsafe, settings from a file."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from examples.tiny_rl.server import DARTS, Server, serving
from tests.integration.waiting import engine_processes

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
LONG = {"model": "tiny", "prompt": "7a-5b*4>", "n": 8, "max_tokens": 300, "ignore_eos": True}


async def in_flight(server: Server, count: int) -> list[asyncio.Task[httpx.Response]]:
    async def ask(stream: bool) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(f"{server.url}/v1/completions", json=LONG | {"stream": stream})

    tasks = [asyncio.create_task(ask(stream=bool(i % 2))) for i in range(count)]
    while await asyncio.to_thread(server.busy) < 8 * count:
        await asyncio.sleep(0.05)
    return tasks


async def test_a_killed_engine_is_noticed_told_and_ends_the_server_with_an_error(tmp_path: Path) -> None:
    with serving(DARTS, tmp_path / "log") as server:
        requests = await in_flight(server, 8)
        for child in engine_processes(server):
            os.kill(child, signal.SIGKILL)
        began = time.monotonic()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert time.monotonic() - began < 10
        for number, answer in enumerate(answers):
            assert isinstance(answer, httpx.Response), answer
            if number % 2:
                assert "error" in answer.text
                assert '"code": 5' in answer.text
            else:
                assert answer.status_code >= 500
                assert answer.json()["error"]["message"]
        with suppress(httpx.TransportError):  # gone already
            assert httpx.get(f"{server.url}/health").status_code >= 500
        server.process.wait(30)
        assert server.process.returncode not in (0, None), server.last_words()


async def test_a_server_that_is_told_to_stop_exits_cleanly(tmp_path: Path) -> None:
    """And one with chunked prefill on CPU refuses what would kill its engine, and reads its settings from a file."""
    settings = tmp_path / "darts.toml"
    settings.write_text('redundancy = 2.0\nnum_longest = 0\npolicy = "off"\n')
    flags = ("--max-num-batched-tokens", "64", "--enable-chunked-prefill", "--max-num-seqs", "8")
    ours = ("--darts-config", str(settings), "--num-longest", "2")
    with serving(DARTS, tmp_path / "log", *flags, *ours, env={"DARTS_POLICY": "uniform"}) as server:
        url = f"{server.url}/v1/completions"
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "7" * 100, "seed": 1, "max_tokens": 5, "n": 2, "stream": stream}
            answer = httpx.post(url, json=body, timeout=60)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "seed"
            assert "max_num_batched_tokens = 64" in answer.json()["error"]["message"]
        body = {"model": "tiny", "prompt": "7" * 100, "max_tokens": 5, "n": 4}
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        # The flag beats the file (2 beats 0, so n = 2 is too small), the environment beats the file ("off").
        assert "num_longest = 2" in httpx.post(url, json=body | {"n": 2}).json()["error"]["message"]
        assert server.metric("darts_candidates_started_total") == 8
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        assert server.process.returncode == 0, server.last_words()
