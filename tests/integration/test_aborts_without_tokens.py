"""Every caller of a request that is aborted before its first token gets the reason, on every route and in every form.

The requests wait in the engine's queue, behind requests that fill the engine, so that none of them has a token.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration import waiting
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

PROMPT = "3a*7b+2c-5d*9>"
CHAT = [{"role": "user", "content": PROMPT}]
SLOTS = 4
QUEUED_ROUNDS = 24
"""Rounds of full engines in front of the requests: thousands of decode steps, many times what sending them takes."""
FILLER = {
    "model": "tiny:raw",
    "prompt": [PROMPT] * QUEUED_ROUNDS,
    "n": SLOTS,
    "max_tokens": 250,
    "ignore_eos": True,
}
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
JOINED = {"X-Darts-Group": "size=2"}
SEQUENCES = {("tiny:raw", 1): 1, ("tiny:raw", 3): 3, ("tiny", 3): 5, ("tiny", 1): 1.5}
"""Sequences on the engine for a request for so many choices: groups have half as many candidates again, rounded up."""


SHOWN = 300
"""Characters of each wrong answer that a failure shows."""


class Case(NamedTuple):
    """A request: its route, body and headers, and how many choices it asks for."""

    path: str
    body: dict[str, Any]
    choices: int = 1
    headers: Mapping[str, str] = {}


def make_cases(stream: bool) -> dict[str, Case]:
    """Return requests on all routes: raw, shaped and joined, with and without what changes vLLM's chunks."""
    cases = {}
    for form, model, n, headers in (
        ("raw", "tiny:raw", 1, {}),
        ("raw n=3", "tiny:raw", 3, {}),
        ("shaped", "tiny", 3, {}),
        ("joined", "tiny", 1, JOINED),
    ):
        text = {"model": model, "prompt": PROMPT, "n": n, "max_tokens": 40, "stream": stream}
        chat = {"model": model, "messages": CHAT, "n": n, "max_completion_tokens": 41, "stream": stream}
        sampling = {"n": n, "max_tokens": 42}
        tokens = {"model": model, "token_ids": [5, 6, 7, 8], "sampling_params": sampling, "stream": stream}
        logprobs = tokens | {"sampling_params": sampling | {"logprobs": 1}}
        usage = {"stream_options": USAGE} if stream else {}
        continuous = {"stream_options": CONTINUOUS} if stream else {}
        ids = {"return_token_ids": True}
        for name, path, body in (
            ("completions", "/v1/completions", text),
            ("completions usage", "/v1/completions", text | usage),
            ("completions ids", "/v1/completions", text | ids | continuous),
            ("completions logprobs", "/v1/completions", text | ids | {"logprobs": 1} | usage),
            ("completions echo", "/v1/completions", text | {"echo": True} | usage),
            ("chat", "/v1/chat/completions", chat),
            ("chat usage", "/v1/chat/completions", chat | usage),
            ("chat ids", "/v1/chat/completions", chat | ids | continuous),
            ("chat logprobs", "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 1} | usage),
            ("tokens", "/inference/v1/generate", tokens),
            ("tokens usage", "/inference/v1/generate", tokens | usage),
            ("tokens ids", "/inference/v1/generate", tokens | ids | continuous),
            ("tokens logprobs", "/inference/v1/generate", logprobs | usage),
        ):
            cases[f"{name}, {form}"] = Case(path, body, n, headers)
        if n == 1:
            answer = {"model": model, "input": PROMPT, "max_output_tokens": 43, "stream": stream}
            message = {"model": model, "messages": CHAT, "max_tokens": 44, "stream": stream}
            cases[f"responses, {form}"] = Case("/v1/responses", answer, 1, headers)
            cases[f"messages, {form}"] = Case("/v1/messages", message, 1, headers)
    return cases


class Answer(NamedTuple):
    """What a caller got. ``events``: the data of a stream's events, or the whole answer as the only one."""

    status: int
    events: list[str]


async def send(client: httpx.AsyncClient, case: Case, headers: Mapping[str, str]) -> Answer:
    async with client.stream("POST", case.path, json=case.body, headers={**case.headers, **headers}) as answer:
        text = (await answer.aread()).decode()
    if not case.body["stream"]:
        return Answer(answer.status_code, [text])
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return Answer(answer.status_code, lines)


@asynccontextmanager
async def queued(
    server: Server, cases: Mapping[str, Case], headers: Mapping[str, str]
) -> AsyncIterator[dict[str, "asyncio.Task[Answer]"]]:
    """Send requests to an engine that is full, and yield their answers when all requests wait in its queue."""
    # Joined requests come in pairs. Groups have half as many candidates again.
    twice = {f"{name} {number}": case for name, case in cases.items() for number in (1, 2) if case.headers}
    all_cases = {name: case for name, case in cases.items() if not case.headers} | twice
    sequences = sum(SEQUENCES[case.body["model"], case.choices] for case in all_cases.values())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        filler = asyncio.create_task(client.post("/v1/completions", json=FILLER))
        while await asyncio.to_thread(server.metric, "vllm:num_requests_waiting") < (QUEUED_ROUNDS - 1) * SLOTS:
            assert not filler.done(), filler.result().text
        before = await asyncio.to_thread(count_sequences, server)
        tasks = {name: asyncio.create_task(send(client, case, headers)) for name, case in all_cases.items()}
        while await asyncio.to_thread(count_sequences, server) < before + sequences:
            assert not filler.done(), "the engine was not full for long enough"
            assert not any(task.done() for task in tasks.values()), [t.result() for t in tasks.values() if t.done()]
        yield tasks
        await asyncio.gather(*tasks.values(), filler)


def count_sequences(server: Server) -> float:
    """Count the sequences that the engine has got so far: those that have ended, run and wait."""
    return server.metric("vllm:request_success_total") + server.count_requests()


def find_reasons(case: Case, answer: Answer) -> dict[int, Any]:
    """Return the finish reason of each choice, and check what else an answer has to have."""
    assert answer.status == 200, answer.events
    streamed = case.body["stream"]
    match case.path:
        case "/v1/responses":
            whole = json.loads(answer.events[-1])
            if streamed:
                assert whole["type"] == "response.completed"
                whole = whole["response"]
            return {0: "abort" if whole["status"] == "cancelled" else whole["status"]}
        case "/v1/messages":
            # Anthropic has no such reason, so that vLLM answers without one.
            deltas = [
                event["delta"] for event in map(json.loads, answer.events) if event.get("type") == "message_delta"
            ]
            whole = deltas[-1] if streamed else json.loads(answer.events[-1])
            return {0: whole.get("stop_reason") or "abort"}
    chunks = answer.events
    if streamed:
        assert chunks.pop() == "[DONE]", answer.events
    reasons: dict[int, Any] = {}
    usage = None
    for chunk in map(json.loads, chunks):
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert not choice.get("token_ids"), "nothing was generated"
            if choice.get("finish_reason") is not None:
                assert choice["index"] not in reasons, "one terminal chunk a choice"
                reasons[choice["index"]] = choice["finish_reason"]
    if not streamed or case.body.get("stream_options"):
        assert usage is not None
        assert usage.get("completion_tokens", 0) == 0
        assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    return reasons


async def check_all(cases: Mapping[str, Case], tasks: Mapping[str, "asyncio.Task[Answer]"]) -> None:
    wrong = {}
    for name, task in tasks.items():
        case = cases[name] if name in cases else cases[name[:-2]]
        try:
            reasons = find_reasons(case, await task)
        except AssertionError as error:
            wrong[name] = str(error)
            continue
        if reasons != dict.fromkeys(range(case.choices), "abort"):
            wrong[name] = f"{reasons} {(await task).events}"
    shown = "\n".join(f"{name}: {why[:SHOWN]}" for name, why in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(tasks)} answers:\n{shown}"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("route", ["/abort_requests", "/pause?mode=abort"])
async def test_an_abort_before_the_first_token_has_its_reason_on_every_route(
    aborting: Server, route: str, stream: bool
) -> None:
    cases = make_cases(stream)
    async with httpx.AsyncClient(base_url=aborting.url, timeout=240) as client, queued(aborting, cases, {}) as tasks:
        answer = await client.post(route, json={})
        assert answer.status_code == 200, answer.text
        await asyncio.wait(tasks.values(), timeout=60)
        if route != "/abort_requests":
            await client.post("/resume")
    await check_all(cases, tasks)
    await asyncio.to_thread(waiting.wait_idle, aborting)


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return ["--enable-scale-out", "--max-num-seqs", str(SLOTS)]


@pytest.fixture(scope="module")
def aborting(serve_one: Serve, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("aborting") / "log"
    with serve_one(DARTS, log, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_server_that_stops_answers_with_the_reason_before_the_first_token(
    serve_one: Serve, flags: list[str], tmp_path: Path, stream: bool
) -> None:
    cases = make_cases(stream)
    with serve_one(DARTS, tmp_path / "log", *flags, "--grace-seconds", "0") as server:
        async with queued(server, cases, {"X-Darts-On-Stop": "answer"}) as tasks:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.wait(tasks.values(), timeout=120)
        assert await asyncio.to_thread(server.process.wait, 180) == 0, server.log_tail()
    await check_all(cases, tasks)
