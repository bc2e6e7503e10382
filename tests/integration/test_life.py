"""The shutdown of a server, under load and while it starts, and servers whose engine hangs or dies."""

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from darts_server.offline.demo.server import DARTS, ENVIRONMENT, FLAGS, launch, serving
from darts_server.store import Store
from tests.integration.events import read_events
from tests.integration.fork_server import Serve
from tests.integration.waiting import engine_processes, wait_started
from tests.store.reading import saved_documents

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PROMPT = "7a-5b*4>"
LONG = {"model": "tiny", "prompt": PROMPT, "n": 8, "max_tokens": 300, "ignore_eos": True}
RAW = {"model": "tiny:raw", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
SINGLE = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}
BATCH = {"prompts": [{"text": PROMPT}] * 4, "group_size": 8, "sampling": {"max_tokens": 300, "ignore_eos": True}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300}
IDS = {"token_ids": [5, 6, 7], "sampling_params": {"n": 8, "max_tokens": 300, "ignore_eos": True}}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", LONG),
    ("/v1/chat/completions", CHAT | {"n": 8, "ignore_eos": True}),
    ("/inference/v1/generate", IDS),
    ("/v1/responses", {"model": "tiny", "input": PROMPT, "max_output_tokens": 300}),
    ("/v1/messages", CHAT),
]
Answers = list[httpx.Response]


def send(client: httpx.AsyncClient, path: str, body: dict[str, Any], count: int = 1, header: str = "") -> list[Any]:
    headers = dict([header.split(": ")] if header else [])
    return [asyncio.create_task(client.post(path, json=body, headers=headers)) for _ in range(count)]


def is_503(answer: httpx.Response) -> bool:
    """Check for the error of a server that shuts down, in OpenAI's format."""
    return answer.status_code == 503 and answer.json()["error"]["code"] == 503


@pytest.mark.nightly
async def test_sigterm_under_load_finishes_what_fits_the_grace_time_and_fails_the_rest(tmp_path: Path) -> None:
    settings = tmp_path / "darts.toml"
    settings.write_text(f'grace_seconds = 3\ngroup_wait = 600\nstate_dir = "{tmp_path / "s"}"\n')
    flags = ("--max-num-seqs", "16", "--darts-config", str(settings))
    with serving(DARTS, tmp_path / "log", *flags, "--log-format", "json") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            assert (await client.post("/v1/completions", json=LONG)).status_code == 200
            singles = send(client, "/v1/completions", SINGLE, 3, "X-Darts-Group: id=g;size=8")
            await asyncio.to_thread(wait_started, server, 12 + 3)
            whole = send(client, "/v1/completions", LONG, 10)
            streams = send(client, "/v1/completions", LONG | {"stream": True}, 4)
            raw = send(client, "/v1/completions", RAW, 6)
            tokens = send(client, "/darts/v1/rollouts", BATCH | {"stream": "tokens"})
            durable = send(client, "/darts/v1/rollouts", BATCH, 1, "Idempotency-Key: k")
            await asyncio.to_thread(wait_started, server, 12 + 3 + 12 * 14 + 96)
            engines = engine_processes(server)

            server.process.send_signal(signal.SIGTERM)
            await check_refuses(client)
            assert [answer.status_code for answer in await asyncio.gather(*singles)] == [200] * 3
            plain: Answers = await asyncio.gather(*whole, *raw, *durable)
            streamed: Answers = await asyncio.gather(*streams, *tokens)
        assert await asyncio.to_thread(server.process.wait, 180) == 0, server.log_tail()
    assert all(answer.status_code == 200 or is_503(answer) for answer in plain)
    assert any(map(is_503, plain)), "the grace time is too short for all of them"
    assert all("[DONE]" in answer.text for answer in streamed[:-1])
    errors = [event["error"]["code"] for answer in streamed[:-1] if "error" in (event := last_event(answer))]
    assert errors
    assert {*errors} == {503}
    check_handed_back(streamed[-1])
    [body] = [answer.json() for answer in plain[-1:] if answer.status_code == 200] or [{"groups": []}]
    assert all(whole_or_aborted(group) for group in body["groups"])
    assert psutil.wait_procs(engines, timeout=120)[1] == []
    with Store(tmp_path / "s") as store:
        [stats] = saved_documents(store, "prompt").values()
    assert isinstance(stats["groups"], int)
    assert stats["groups"] > 1
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert {"darts_server", "vllm", "uvicorn"} <= {line["logger"].partition(".")[0] for line in lines}
    assert PROMPT not in server.log.read_text()


async def check_refuses(client: httpx.AsyncClient) -> None:
    """Check that the server reports its shutdown, takes no new work, and still answers other requests."""
    async with asyncio.timeout(30):
        while (health := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
    refused = await client.post("/v1/completions", json=SINGLE)
    for answer in (health, refused):
        assert is_503(answer)
        assert "stopping" in answer.json()["error"]["message"]
        assert int(answer.headers["Retry-After"]) > 0
    assert (await client.get("/darts/v1/policy")).status_code == 200


def check_handed_back(answer: httpx.Response) -> None:
    """Check that a stream of tokens ends in order, and that each of its groups is whole or says that it is not."""
    assert answer.status_code == 200
    events = list(read_events(answer))
    _, last, done = events[-1]
    assert (last, done["unfinished"]) == ("done", [])
    groups = [data for _, name, data in events if name == "group"]
    assert sorted(group["number"] for group in groups) == [0, 1, 2, 3]
    assert all(map(whole_or_aborted, groups))


def whole_or_aborted(group: dict[str, Any]) -> bool:
    """Whether a group has all of its trajectories, or none, an error, and what its candidates had generated."""
    if group["error"] is None:
        return len(group["trajectories"]) == 8 and group["aborted"] is None
    return group["error"]["code"] == 503 and group["trajectories"] == [] and group["aborted"] is not None


def last_event(answer: httpx.Response) -> dict[str, Any]:
    """Parse the last event of a stream."""
    assert answer.status_code == 200
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    event: dict[str, Any] = json.loads(data[-1])
    return event


async def test_a_hung_engine_fails_all_requests_and_ends_the_server(serve_one: Serve, tmp_path: Path) -> None:
    flags = ("--engine-watchdog", "8", "--max-num-seqs", "16", "--enable-scale-out")
    with serve_one(DARTS, tmp_path / "log", *flags) as server:
        engines = engine_processes(server)
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
                requests = send(client, "/v1/completions", LONG, 8) + send(client, "/v1/completions", RAW, 4)
                await asyncio.to_thread(wait_started, server, 12 * 8)
                messages = send(client, "/v1/messages", CHAT)
                streams = [task for path, body in ROUTES for task in send(client, path, body | {"stream": True})]
                await asyncio.to_thread(wait_started, server, 12 * 11)
                for engine in engines:
                    engine.suspend()
                answers: Answers = await asyncio.gather(*requests)
                streamed: Answers = await asyncio.gather(*streams)
                (message,) = await asyncio.gather(*messages)
            assert await asyncio.to_thread(server.process.wait, 180) == 1, server.log_tail()
        finally:
            for engine in engines:
                with suppress(psutil.NoSuchProcess):
                    engine.kill()
    failed = [answer for answer in answers if answer.status_code != 200]
    assert failed, "16 at a time: not all can have been done before"
    assert all(is_503(answer) and "hung" in answer.json()["error"]["message"] for answer in failed)
    error = failed[0].json()["error"]
    of_messages = {"type": error["type"], "message": error["message"]}
    assert message.status_code == 503
    assert message.json()["error"] == of_messages
    *openai, response, of_anthropic = map(last_event, streamed)
    assert openai == [{"error": error}] * 3
    assert response.pop("sequence_number") > 0
    assert response == {"type": "error", "message": error["message"], "param": None, "code": "503"}
    assert of_anthropic == {"type": "error", "error": of_messages}
    assert psutil.wait_procs(engines, timeout=120)[1] == []
    logged = [line for line in server.log.read_text().splitlines() if "(darts-server" in line or "(APIServer" in line]
    assert "CRITICAL" in logged[-1]
    assert "the engine is hung" in logged[-1]


async def test_a_killed_engine_fails_all_requests_and_ends_the_server_with_an_error(
    serve_one: Serve, tmp_path: Path
) -> None:
    few_at_a_time = ("--max-num-seqs", "2")  # no group completes before the engine is killed
    with serve_one(DARTS, tmp_path / "log", *few_at_a_time) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            requests = [send(client, "/v1/completions", LONG | {"stream": bool(i % 2)})[0] for i in range(8)]
            await asyncio.to_thread(wait_started, server, 12 * 8)
            for engine in engine_processes(server):
                engine.kill()
            began = time.monotonic()
            answers: Answers = await asyncio.gather(*requests)
        assert time.monotonic() - began < 120
        for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
            assert is_503(whole), whole.text[:2000]
            assert "was killed (SIGKILL)" in whole.json()["error"]["message"]
            assert '"code": 5' in streamed.text
        with suppress(httpx.TransportError):  # the server has exited already
            assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.process.wait(180) == 1, server.log_tail()
    [last] = [line for line in server.log.read_text().splitlines() if " CRITICAL " in line]
    assert "the engine died: EngineCore was killed (SIGKILL)" in last


@pytest.mark.nightly
def test_a_server_stops_on_sigterm_while_its_engine_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [*DARTS, *FLAGS, "--port", "0", "--worker-extension-cls", "tests.integration.never_ready.Extension"]
    process = launch(command, log, ENVIRONMENT | os.environ)
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
