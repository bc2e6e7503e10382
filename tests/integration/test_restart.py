"""Learned statistics survive a server that is killed, and what groups have generated one that ends in order."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.estimates.latency import LatencyModel
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import DARTS, Server
from darts_server.store import Store
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_counted
from tests.store.reading import saved_documents

pytestmark = pytest.mark.engine
LOSS_SECONDS = 3.0
"""A killed server loses at most the last second of lengths and the last three of engine steps, unless it has to wait
for the disk or for a processor."""

ANSWERED = {"mean_ema": "estimated_mean_tokens", "std_ema": "estimated_std_tokens"}
"""Names in answers of the fields of the state that have other names there."""


def complete(server: Server, prompts: list[str]) -> None:
    body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 100}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).status_code == 200


WRITTEN = {"prompt", "step", "profile", "deadline", "latency"}


def learned(state: Path) -> dict[str, dict[str, Any]]:
    with Store(state) as store:
        kinds = (*WRITTEN, "dataset", "price")
        return {kind: saved_documents(store, kind) for kind in kinds}


def wait_written(state: Path, keys: int) -> None:
    """Wait until two groups of each prompt are on the disk, and what was learned from them and of the engine."""

    def is_written(found: dict[str, dict[str, Any]]) -> bool:
        prompts = found["prompt"].values()
        if not all(found[kind] for kind in WRITTEN):
            return False
        is_known = LatencyModel(**json.loads(found["latency"]["engine"]["value"])).curve is not None
        return is_known and len(prompts) == keys and all(p["groups"] >= 2 for p in prompts)

    began = time.monotonic()
    while not is_written(found := learned(state)):
        assert time.monotonic() - began < 180, found
        time.sleep(0.2)


@pytest.mark.nightly
def test_a_killed_server_has_its_statistics_again_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    rng = Random(3)
    prompts = [sample_problem(rng).prompt for _ in range(16)]
    state = tmp_path / "state"
    flags = ("--policy", "darts_cut", "--redundancy", "auto", "--state-dir", str(state))
    with serve(DARTS, tmp_path / "first.log", *flags) as server:
        for few in (prompts, prompts, prompts[:3]):
            complete(server, few)
        saved = httpx.get(f"{server.url}/darts/v1/state").content
        time.sleep(LOSS_SECONDS)
        wait_written(state, len(set(prompts)))
        with httpx.Client() as client:  # in the middle of a run
            url = f"{server.url}/v1/completions"
            body = {"model": "tiny", "prompt": prompts, "n": 8, "max_tokens": 250, "ignore_eos": True, "stream": True}
            with client.stream("POST", url, json=body) as answer:
                assert answer.status_code == 200
                os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    before = learned(state)
    assert {kind for kind, stats in before.items() if stats} >= WRITTEN
    assert all(stats["groups"] >= 2 for stats in before["prompt"].values())
    assert len(before["prompt"]) == len(set(prompts))

    with serve(DARTS, tmp_path / "second.log", *flags) as server:
        for key, stats in before["prompt"].items():
            restored = httpx.get(f"{server.url}/darts/v1/prompts/{key}").json()
            kept = {name: value for name, value in stats.items() if name != "lengths"}
            assert {name: restored[ANSWERED.get(name, name)] for name in kept} == kept
        assert server.metric("darts_step_seconds", sequences="64") > 0, "the latency curve is known from the start"
        httpx.put(f"{server.url}/darts/v1/state", content=saved, timeout=240).raise_for_status()
        restored = httpx.get(f"{server.url}/darts/v1/prompts/{next(iter(before['prompt']))}").json()
        assert restored["groups"] <= 3, "as saved, without the last groups"


ROLLOUTS = "/darts/v1/rollouts"
SAMPLING = {"max_tokens": 280, "temperature": 0, "logprobs": True}
GREEDY = {"group_size": 1, "sampling": SAMPLING | {"ignore_eos": True}, "policy": {"name": "off"}}
SEEDED = {"group_size": 8, "sampling": SAMPLING | {"temperature": 1, "seed": 33}, "policy": {"name": "off"}}
"""Several candidates of each group finish within 70 tokens, and one runs for 218 or more: with vLLM 0.31 and with 0.32,
which samples other tokens from the same seed."""
Groups = dict[str, dict[str, Any]]


def problems(*numbers: int) -> list[dict[str, Any]]:
    return [{"text": f"{number}a+2b*3c-4d+5e*6f-7g+8h*9i-1a+3b*2c>"} for number in numbers]


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body or {}, timeout=240)


def by_key(body: dict[str, Any]) -> Groups:
    return {group["prompt_key"]: group for group in body["groups"]}


def whole(server: Server, body: dict[str, Any]) -> Groups:
    return by_key(post(server, ROLLOUTS, body).json())


@contextmanager
def running(server: Server, at_least: int, *bodies: dict[str, Any]) -> Iterator[list["Future[httpx.Response]"]]:
    """Run batches, and begin the block when each of their groups has a candidate with so many tokens."""
    groups = sum(len(body["prompts"]) for body in bodies)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(post, server, ROLLOUTS, body) for body in bodies]
        began = time.monotonic()
        while True:
            busy = busy_groups(server)
            tokens = [max(candidate["tokens"] for candidate in group["candidates"]) for group in busy]
            if len(busy) == groups and min(tokens) > at_least:
                break
            assert time.monotonic() - began < 180, busy
            time.sleep(0.01)
        assert not any(answer.done() for answer in answers)
        yield answers


def busy_groups(server: Server) -> list[dict[str, Any]]:
    live: list[dict[str, Any]] = httpx.get(f"{server.url}/darts/v1/live").json()["groups"]
    return [group for group in live if group.get("outcome") is None]


def check_prefix(candidate: dict[str, Any], uncut: dict[str, Any]) -> None:
    """Check what a candidate had generated when it was aborted."""
    length = candidate["length"]
    assert candidate["finish_reason"] == "abort" or candidate["token_ids"] == uncut["token_ids"]
    assert candidate["token_ids"] == uncut["token_ids"][:length]
    assert candidate["logprobs"] == pytest.approx(uncut["logprobs"][:length], abs=1e-3)
    assert uncut["text"].startswith(candidate["text"])
    assert candidate["version_spans"] == ([[0, length]] if length else [])


def check_same(group: dict[str, Any], uncut: dict[str, Any]) -> None:
    """Check that a group is whole, and the one that would have come without any stop."""
    assert (group["error"], group["aborted"]) == (None, None)
    assert len(group["trajectories"]) == len(uncut["trajectories"])
    for one, other in zip(group["trajectories"], uncut["trajectories"], strict=True):
        assert (one["token_ids"], one["text"]) == (other["token_ids"], other["text"])
        assert one["finish_reason"] == other["finish_reason"]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
        assert one["version_spans"] == [[0, one["length"]]]


@pytest.mark.nightly
def test_what_groups_have_generated_outlives_aborts_and_a_server_that_ends_in_order(
    serve: Serve, tmp_path: Path
) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--grace-seconds", "0", "--max-num-seqs", "64")
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    one, eight = GREEDY | {"prompts": problems(4, 5, 6)}, SEEDED | {"prompts": problems(1, 2, 3)}
    kept = {"carry": "resume"}
    with serve(DARTS, tmp_path / "first.log", *flags, env=environment) as server:
        greedy, seeded = whole(server, one), whole(server, eight)
        with running(server, 20, one | kept) as [carried]:
            assert post(server, "/abort_requests").status_code == 200
        body = carried.result().json()
        assert (body["groups"], body["carried"]) == ([], 3)
        assert all("aborted" in prompt["error"]["message"] for prompt in body["unfinished"])

        unshaped = {"model": "tiny:raw", "prompt": "7a-5b*4>", "max_tokens": 300, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            raw = pool.submit(post, server, "/v1/completions", unshaped)
            with running(server, 80, eight | kept, eight) as waiting:
                more = pool.submit(post, server, ROLLOUTS, one | kept | {"prompts": [], "carried": True})
                while len(busy_groups(server)) < 6 + 3:
                    assert not any(answer.done() for answer in (*waiting, more))
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(180) == 0, server.log_tail()
        stopped, handed_back = (answer.result().json() for answer in waiting)
        for group in handed_back["groups"]:
            assert "stopping" in group["error"]["message"]
            assert group["trajectories"] == []
            for candidate, uncut in zip(group["aborted"], seeded[group["prompt_key"]]["trajectories"], strict=True):
                check_prefix(candidate, uncut)
                assert candidate["length"] >= min(70, uncut["length"])
        finishes = {candidate["finish_reason"] for group in handed_back["groups"] for candidate in group["aborted"]}
        assert finishes >= {"abort", "stop"}
        unfinished = stopped["unfinished"] + more.result().json()["unfinished"]
        assert {(prompt["carry"], prompt["error"]["code"]) for prompt in unfinished} == {("resume", 503)}
        assert raw.result().status_code == 503, "no partial answer of vLLM's routes without a pause or an abort"

    with serve(DARTS, tmp_path / "second.log", *flags, env=environment) as server:
        found = whole(server, one | kept)
        assert len(found) == 3
        for prompt_key, group in found.items():
            check_same(group, greedy[prompt_key])
        found = whole(server, eight | kept | {"prompts": [], "carried": True})
        assert len(found) == 3
        for prompt_key, group in found.items():
            assert (group["error"], len(group["trajectories"])) == (None, 8)
            for one, uncut in zip(group["trajectories"], seeded[prompt_key]["trajectories"], strict=True):
                assert one["token_ids"][:70] == uncut["token_ids"][:70]
                if uncut["length"] <= 70:  # it had finished
                    assert (one["text"], one["finish_reason"]) == (uncut["text"], uncut["finish_reason"])
                    assert one["logprobs"] == pytest.approx(uncut["logprobs"], abs=1e-3)
        assert post(server, ROLLOUTS, eight | {"prompts": [], "carried": True}).status_code == 400, "none is left"


def test_a_stopping_server_answers_those_that_want_it_with_what_was_generated(serve: Serve, tmp_path: Path) -> None:
    sampling = {"prompt": "7a-5b*4>", "max_tokens": 300, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    answered = {"X-Darts-On-Stop": "answer"}
    grouped = {"X-Darts-Group": "id=g;size=2", "X-Darts-Policy": "uniform"}
    requests: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"model": "tiny:raw"}, answered),
        ({"model": "tiny:raw", "n": 2, "vllm_xargs": {"darts_on_stop": "answer"}}, {}),
        ({"model": "tiny", "n": 4}, {"X-Darts-Policy": "uniform"} | answered),
        ({"model": "tiny"}, grouped | answered),
        ({"model": "tiny"}, grouped | answered),
        ({"model": "tiny:raw"}, {}),
        ({"model": "tiny", "n": 4}, {"X-Darts-Policy": "uniform", "X-Darts-On-Stop": "fail"}),
    ]
    with serve(DARTS, tmp_path / "log", "--grace-seconds", "0") as server:
        url = f"{server.url}/v1/completions"
        with ThreadPoolExecutor(len(requests)) as pool:
            for _ in range(10):
                answers = [
                    pool.submit(httpx.post, url, json=sampling | body, headers=headers, timeout=240)
                    for body, headers in requests
                ]
                if are_generating(server, answers, 1 + 2 + 6 + 3 + 1 + 6, 600):  # with the extra candidates
                    break
                wait(answers)  # on a busy machine some end before others begin
            else:
                pytest.fail("requests never ran all at once")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(180) == 0, server.log_tail()
    *partial, unshaped, shaped = (answer.result() for answer in answers)
    assert (unshaped.status_code, shaped.status_code) == (503, 503)
    for (body, _), answer in zip(requests, partial, strict=False):
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert len(choices) == body.get("n", 1)
        for choice in choices:
            assert choice["finish_reason"] == "abort"
            assert 0 < len(choice["token_ids"]) < 300, body
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


def are_generating(server: Server, answers: Sequence["Future[httpx.Response]"], requests: int, tokens: float) -> bool:
    """Wait until the engines run so many requests, and have then generated so many tokens, before any is answered."""
    began = time.monotonic()
    while server.metric("vllm:num_requests_running") < requests:
        if any(answer.done() for answer in answers):
            return False
        assert time.monotonic() - began < 180, server.log_tail()
        time.sleep(0.01)
    name = "vllm:generation_tokens_total"
    wait_counted(server, name, server.metric(name) + tokens)
    return not any(answer.done() for answer in answers)


@pytest.mark.nightly
def test_a_disk_that_is_full_at_the_end_is_exit_code_3(serve_one: Serve, tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--grace-seconds", "0")
    body = GREEDY | {"prompts": problems(1, 2, 3), "carry": "resume"}
    with serve_one(DARTS, tmp_path / "log", *flags) as server, running(server, 20, body):
        # No file can be written any more, nor the log.
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, most))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(180) == 3, server.log_tail()
