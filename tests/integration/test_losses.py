"""Engines of a fleet die or hang while groups, batches and vLLM's own requests run: callers notice the time alone."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fleets import Marked, fleet, wait_up
from tests.integration.test_rollouts import prompts

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SIZE, PROMPTS, SINGLE = 4, 32, 32
WATCHDOG = 30.0  # beside other tests an engine that runs may take seconds for a step
SECONDS = 300.0
GREEDY = {"model": "tiny:raw", "prompt": "3b+4a*2>", "max_tokens": 250, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def marked() -> Marked:
    return Marked()


@pytest.fixture(scope="module")
def server(marked: Marked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("losses") / "log"
    with fleet(2, DARTS, log, "--engine-watchdog", str(WATCHDOG), "--max-num-seqs", "64", env=marked.env) as running:
        yield running


def post(server: Server, path: str, body: object) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: Server, **more: Any) -> Any:
    return post(server, "/v1/completions", GREEDY | more)


def stream(server: Server) -> str:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=GREEDY | {"stream": True}, timeout=SECONDS
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def check_logprobs(server: Server, prompt: str, trajectory: dict[str, Any]) -> None:
    """Check that log-probs are those of these tokens after this prompt."""
    tokens = post(server, "/tokenize", {"model": "tiny", "prompt": prompt})["tokens"] + trajectory["token_ids"]
    body = {"model": "tiny:raw", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    [choice] = post(server, "/v1/completions", body)["choices"]
    place = len(tokens) - trajectory["length"]
    scored = [choice["prompt_logprobs"][place + i][str(token)]["logprob"] for i, token in enumerate(tokens[place:])]
    assert scored == pytest.approx(trajectory["logprobs"], abs=1e-3)


@pytest.mark.parametrize("policy", ["uniform", "darts_cut"])
@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, number) for number in (signal.SIGKILL, signal.SIGSTOP) for kind in ("host", "engine", "actor")],
)
def test_no_caller_notices_that_an_engine_is_gone(
    server: Server, marked: Marked, kind: str, number: signal.Signals, policy: str
) -> None:
    wait_up(server, 2)
    expected = {penalty: complete(server, presence_penalty=penalty)["choices"][0]["text"] for penalty in (0.0, 1.0)}
    texts, before = prompts(PROMPTS, seed=number), server.metric("darts_engines_lost_total")
    batch = {
        "prompts": [{"text": text} for text in texts],
        "group_size": SIZE,
        "sampling": {"max_tokens": 200, "logprobs": True},
        "policy": {"name": policy},
    }
    with ThreadPoolExecutor(SINGLE + 8) as pool:
        whole = pool.submit(post, server, "/darts/v1/rollouts", batch)
        groups: list[Future[Any]] = [
            pool.submit(
                post, server, "/v1/completions", {"model": "tiny", "prompt": text, "n": SIZE, "max_tokens": 200}
            )
            for text in prompts(SINGLE, seed=1)
        ]
        raw = {penalty: pool.submit(complete, server, presence_penalty=penalty) for penalty in expected}
        streamed = pool.submit(stream, server)
        time.sleep(0.7)
        process = marked.process(kind)
        process.send_signal(number)
        sent = time.monotonic()
        is_lost = kind != "actor" or number == signal.SIGKILL  # of an actor that is stopped nothing is needed
        if is_lost:
            while server.metric("darts_engines_lost_total") == before:
                assert time.monotonic() < sent + 60
                time.sleep(0.02)
            print(f"{kind}, {number.name}: noticed after {time.monotonic() - sent:.2f} s")
        body = whole.result(SECONDS)
        answers = [group.result(SECONDS) for group in groups]
        assert {penalty: each.result(SECONDS)["choices"][0]["text"] for penalty, each in raw.items()} == expected
        assert streamed.result(SECONDS) == expected[0.0]
    if number == signal.SIGSTOP and not is_lost:
        process.resume()
    for text, group in zip(texts, body["groups"], strict=True):
        assert group["error"] is None
        assert not group["mixed_versions"]
        assert len(group["trajectories"]) == SIZE
        assert len(group["trajectories"]) + len(group["discarded"]) == group["candidates"]
        for trajectory in group["trajectories"]:
            assert trajectory["length"] == len(trajectory["token_ids"]) == len(trajectory["logprobs"])
            assert trajectory["finish_reason"] in ("stop", "length")
        check_logprobs(server, text, Random(text).choice(group["trajectories"]))
    for answer in answers:
        assert [choice["finish_reason"] in ("stop", "length") for choice in answer["choices"]] == [True] * SIZE
    assert not httpx.get(f"{server.url}/health").is_error


@pytest.mark.parametrize("kind", ["engine", "host"])
def test_sessions_go_on_when_their_engine_is_lost_and_no_token_counts_twice(
    server: Server, marked: Marked, kind: str
) -> None:
    wait_up(server, 2)
    before = server.metric("darts_engines_lost_total")
    open_before = server.metric("darts_sessions_open")
    made = post(server, "/darts/v1/sessions", {"size": 12, "extra": 0, "policy": "off"})

    def run(session: dict[str, Any], *, streams: bool) -> list[int]:
        """Run four turns, each of which continues the last, and return all tokens."""
        tokens: list[int] = post(server, "/tokenize", {"model": "tiny", "prompt": "3b+4a*2>"})["tokens"]
        for _ in range(4):
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
            url = f"{session['base_url']}/completions"
            answer = httpx.post(url, json={**body, "stream": streams}, timeout=SECONDS)
            assert answer.status_code == 200, answer.text
            if streams:
                lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                choices = [json.loads(line)["choices"][0] for line in lines]
            else:
                choices = answer.json()["choices"]
            tokens = tokens + [token for choice in choices for token in choice["token_ids"] or ()]
        return tokens

    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(run, session, streams=session["index"] % 2 == 0) for session in made["sessions"]]
        time.sleep(0.5)
        marked.process(kind).send_signal(signal.SIGKILL)
        histories = [each.result(SECONDS) for each in running]
    deadline = time.monotonic() + 60
    while server.metric("darts_engines_lost_total") == before:
        assert time.monotonic() < deadline
    for session, history in zip(made["sessions"], histories, strict=True):
        state = post(server, f"/darts/v1/sessions/{session['id']}:end", {"reward": 1.0})
        assert (state["turns"], state["tokens"], state["running_turns"]) == (4, 240, 0)
        rows = httpx.get(f"{server.url}/darts/v1/sessions/{session['id']}").json()["rows"]
        assert [row["token_ids"] for row in rows] == [history]
        assert sum(rows[0]["mask"]) == 240
    group = httpx.get(f"{server.url}/darts/v1/session-groups/{made['group_id']}").json()
    assert group["state"] == "completed"
    assert server.metric("darts_sessions_open") == open_before
