"""vLLM's own routes for pauses and weights, as trainers use them, while groups run."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file
from vllm.outputs import CompletionOutput

from darts_server.offline.demo.server import DARTS, Server
from tests.integration import backend, waiting
from tests.integration.events import Events, assemble_groups, read_events
from tests.integration.fork_server import Serve
from tests.integration.weights import (
    EMBEDDING,
    ORIGINAL,
    PROMPT,
    is_same,
    max_difference,
    perturbed,
    put,
    sample,
    status,
)

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
PATIENCE = 8.0
"""Seconds without a call after which the trainer counts as dead: many times what a step takes."""
NORM = "model.norm.weight"
GENERATED = "vllm:generation_tokens_total"
GROUP: dict[str, Any] = {
    "prompts": [{"text": PROMPT}],
    "group_size": 4,
    "sampling": {"max_tokens": 250, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> Iterator[Server]:
    flags = {
        "--worker-extension-cls": "tests.integration.backend.Extension",
        "--weight-transfer-config": json.dumps({"backend": backend.NAME}),
        "--weights-timeout": str(PATIENCE),
        "--dialect": "skyrl",
    }
    arguments = ["--enable-scale-out", *(word for pair in flags.items() for word in pair)]
    with serve(DARTS, folder / "routes.log", *arguments, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


class Trainer:
    """Calls the routes in the order of SkyRL's and TRL's clients, and checks for vLLM's answers."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._url = server.url
        self._folder = folder

    def post(self, route: str, body: Any = None) -> httpx.Response:
        return httpx.post(f"{self._url}{route}", json={} if body is None else body, timeout=240)

    def pause(self, mode: str) -> None:
        answer = self.post(f"/pause?mode={mode}")
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})

    def resume(self) -> None:
        answer = self.post("/resume")
        assert (answer.status_code, answer.json()) == (200, {"status": "resumed"})

    def start(self) -> None:
        answer = self.post("/start_weight_update")
        assert (answer.status_code, answer.json()) == (200, {"message": "Weight update started"})

    def write(self, seed: int, *names: str, bad: str | None = None) -> None:
        """Write tensors to the model. ``bad``: the name of a tensor that gets an infinite number."""
        path = self._folder / f"{seed}.safetensors"
        weights = perturbed(seed)
        if bad is not None:
            weights[bad].view(-1)[-1] = -math.inf
        save_file(weights, path)
        info = {"path": str(path), "names": list(names) or sorted(ORIGINAL)}
        answer = self.post("/update_weights", {"update_info": info})
        assert (answer.status_code, answer.json()) == (200, {"message": "Weights updated"})

    def finish(self) -> None:
        answer = self.post("/finish_weight_update")
        assert (answer.status_code, answer.json()) == (200, {"message": "Weight update finished"})

    def update(self, seed: int) -> None:
        names = sorted(ORIGINAL)
        self.start()
        self.write(seed, *names[::2])
        self.write(seed, *names[1::2])
        self.finish()


@pytest.fixture
def trainer(server: Server, folder: Path) -> Iterator[Trainer]:
    """One that leaves no paused engine to other tests when its own fails."""
    trainer = Trainer(server, folder)
    yield trainer
    if httpx.get(f"{server.url}/is_paused").json()["is_paused"]:
        trainer.resume()


def wait_serving(server: Server, seconds: float = 120.0) -> dict[str, Any]:
    """Wait for the end of the update in progress; return the status."""
    deadline = time.monotonic() + seconds
    while (now := status(server))["state"] != "serving":
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


async def run_during_group(server: Server, do: Any) -> httpx.Response:
    """Call ``do`` while a group runs; return the answer to the request for the group."""
    async with httpx.AsyncClient(timeout=240) as client:
        before = server.metric("darts_candidates_started_total")
        request = asyncio.create_task(client.post(f"{server.url}/darts/v1/rollouts", json=GROUP))
        await asyncio.to_thread(waiting.wait_started, server, before + 1)
        # Some steps more, so that the group has generated something.
        await asyncio.to_thread(waiting.wait_counted, server, GENERATED, server.metric(GENERATED) + 64)
        await asyncio.to_thread(do)
        return await request


def versions(answer: httpx.Response) -> set[int]:
    assert answer.status_code == 200, answer.text
    (group,) = answer.json()["groups"]
    return {t[f"weight_version_{end}"] for t in group["trajectories"] for end in ("start", "end")}


@pytest.mark.nightly
def test_the_old_weights_are_restored_when_a_trainer_dies(server: Server, trainer: Trainer) -> None:
    """Must be the first test: the old weights can be restored as long as they are in files."""
    before = sample(server)
    trainer.start()
    trainer.write(1, *sorted(ORIGINAL)[:9])
    now = wait_serving(server)
    assert (now["version"], now["intact"], now["last"]["outcome"]) == (0, True, "failed")
    assert f"did not call for {PATIENCE:.0f} s" in now["last_error"]
    assert "the old weights were restored" in now["last_error"]
    assert now["last_error"] in server.log.read_text()
    assert is_same(sample(server), before)
    assert max_difference(server, ORIGINAL) < 1e-5


@pytest.mark.nightly
def test_a_failed_call_gets_vllms_answer_and_ends_the_update(server: Server, trainer: Trainer, folder: Path) -> None:
    trainer.start()
    info = {"path": str(folder / "nothing.safetensors"), "names": sorted(ORIGINAL)}
    assert trainer.post("/update_weights", {"update_info": info}).status_code == 500
    assert "the old weights were restored" in status(server)["last_error"]
    assert max_difference(server, ORIGINAL) < 1e-5
    assert trainer.post("/finish_weight_update").status_code == 500
    assert len(sample(server)) == 4


def test_numbers_that_are_not_finite_end_an_update_and_the_old_weights_are_restored(
    server: Server, trainer: Trainer
) -> None:
    """Must be one of the first tests: the old weights can be restored as long as they are in files."""
    before = sample(server)
    # On CPU vLLM packs the weights of linear layers when they arrive, and nothing else can read them.
    for name in (NORM, EMBEDDING):
        trainer.start()
        trainer.write(60, bad=name)
        answer = trainer.post("/finish_weight_update")
        assert answer.status_code == 503, answer.text
        assert f"parameter {name} has NaN or infinity" in answer.json()["error"]["message"]
        now = status(server)
        assert (now["version"], now["intact"], now["last"]["outcome"]) == (0, True, "failed")
        assert "the old weights were restored" in now["last_error"]
        assert is_same(sample(server), before)
    assert trainer.post("/finish_weight_update?check_finite=perhaps").status_code == 400


async def test_an_update_waits_for_groups_and_is_recorded(server: Server, trainer: Trainer) -> None:
    version = status(server)["version"]
    answer = await run_during_group(server, lambda: trainer.update(2))
    assert versions(answer) == {version}
    now = status(server)
    assert (now["version"], now["intact"]) == (version + 1, True)
    last = now["last"]
    assert (last["source"], last["rule"], last["outcome"]) == ("vllm", "finish", "completed")
    assert last["seconds"].keys() == {"wait", "pause", "load", "transfer", "resume"}
    assert server.metric("darts_weight_version") == version + 1
    assert max_difference(server, perturbed(2)) < 1e-5
    assert trainer.post("/reset_prefix_cache").json() == {"success": True}


async def test_groups_across_a_pause_with_keep_record_both_versions(server: Server, trainer: Trainer) -> None:
    version = status(server)["version"]

    def update() -> None:
        trainer.pause("keep")
        trainer.update(3)
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
        trainer.resume()

    assert versions(await run_during_group(server, update)) == {version, version + 1}
    assert status(server)["last"]["rule"] is None
    assert max_difference(server, perturbed(3)) < 1e-5


async def test_after_a_pause_that_keeps_caches_later_requests_use_none_of_the_old_weights(
    server: Server, trainer: Trainer
) -> None:
    # Longer than a block of the cache.
    body = {"model": "tiny:raw", "prompt": [5, 6, 7, 8, 9] * 40, "max_tokens": 4, "temperature": 0, "logprobs": 0}

    def first_logprobs() -> list[float]:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).json()
        logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return logprobs

    def update() -> None:
        # The cache has blocks of this request, which has ended, and the blocks of the group, which are in use.
        first_logprobs()
        trainer.pause("keep&clear_cache=false")
        trainer.update(60)
        trainer.resume()

    await run_during_group(server, update)
    after = first_logprobs()
    trainer.post("/reset_prefix_cache")
    assert after == pytest.approx(first_logprobs(), abs=1e-5)


@pytest.mark.nightly
def test_skyrls_full_weights_are_served(server: Server, trainer: Trainer, folder: Path) -> None:
    version = status(server)["version"]
    save_file(perturbed(50), folder / "50.safetensors")
    info = {"path": str(folder / "50.safetensors"), "names": sorted(ORIGINAL)}
    trainer.pause("keep&clear_cache=false")
    for method, arguments in (
        ("skyrl_start_weight_update", {"is_checkpoint_format": True}),
        ("update_weights_nccl", {"update_info": info}),
        ("skyrl_finish_weight_update", {}),
    ):
        answer = trainer.post("/collective_rpc", {"method": method, "kwargs": arguments})
        assert answer.status_code == 200, answer.text
    trainer.resume()
    assert max_difference(server, perturbed(50)) < 1e-5
    assert status(server)["version"] == version + 1
    assert trainer.post("/collective_rpc", {"method": "get_model"}).status_code == 403


def check_handed_back(answer: httpx.Response, words: str, version: int) -> None:
    """Check for a batch of one group that is no group, with what its candidates had generated."""
    assert answer.status_code == 200, answer.text
    [group] = answer.json()["groups"]
    assert group["error"]["code"] == 503
    assert words in group["error"]["message"]
    assert (group["trajectories"], group["discarded"]) == ([], [])
    assert len(group["aborted"]) == group["candidates"] >= 4
    for candidate in group["aborted"]:
        assert (candidate["finish_reason"], len(candidate["token_ids"])) == ("abort", candidate["length"])
        assert candidate["version_spans"] == ([[version, candidate["length"]]] if candidate["length"] else [])
    assert answer.json()["usage"]["returned"] == 0
    assert answer.json()["usage"]["generated"] > 0


async def test_a_pause_with_abort_hands_groups_back(server: Server, trainer: Trainer) -> None:
    """Unshaped requests end as in vLLM. A group that is sent again runs with the new weights."""
    version = status(server)["version"]
    body = {"model": "tiny:raw", "prompt": PROMPT, "n": 8, "max_tokens": 300, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=240) as client:
        generated = server.metric(GENERATED)
        unshaped = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
        await asyncio.to_thread(waiting.wait_counted, server, GENERATED, generated + 1)
        assert not unshaped.done(), "the requests were finished before they were seen to run"
        loop = asyncio.get_running_loop()
        again: list[Future[httpx.Response]] = []

        def update() -> None:
            trainer.pause("abort")
            sending = client.post(f"{server.url}/darts/v1/rollouts", json=GROUP)
            again.append(asyncio.run_coroutine_threadsafe(sending, loop))
            trainer.update(5)
            trainer.resume()

        answer = await run_during_group(server, update)
        check_handed_back(answer, "mode=abort", version)
        assert (await unshaped).json()["choices"][0]["finish_reason"] == "abort"
        assert versions(await asyncio.wrap_future(again[0])) == {version + 1}


def check_refused(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 409, answer.text
    assert answer.json()["error"]["type"] == "ConflictError"
    assert words in answer.json()["error"]["message"]


ABORTED = ("/abort_requests", "/pause?mode=abort")
SEEDS = [11, 12, 13, 14]
LONG = {"max_tokens": 250, "ignore_eos": True, "logprobs": 0}
CHAT = [{"role": "user", "content": PROMPT}]
TEXT = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, "return_tokens_as_token_ids": True, **LONG}
ONE_OF_FOUR = {"darts_group_size": 4}


def abortable(form: str, prompt_ids: list[int]) -> list[tuple[str, dict[str, Any]]]:
    """Requests for a group of four whose seeds are `SEEDS`."""
    match form:
        case "chat":  # the tiny model's template adds no tokens
            chat = {"messages": CHAT, "max_completion_tokens": 250, "ignore_eos": True, "logprobs": True}
            body = {"model": "tiny", "n": 4, "seed": SEEDS[0], "return_token_ids": True}
            return [("/v1/chat/completions", body | chat)]
        case "one request":
            return [("/v1/completions", TEXT | {"n": 4, "seed": SEEDS[0]})]
        case "single requests":
            return [("/v1/completions", TEXT | {"seed": seed, "vllm_xargs": ONE_OF_FOUR}) for seed in SEEDS]
        case "an incomplete group":
            more = {"darts_group_size": 5}
            return [("/v1/completions", TEXT | {"seed": seed, "vllm_xargs": more}) for seed in SEEDS]
    sampling = [LONG | {"seed": seed, "extra_args": ONE_OF_FOUR} for seed in SEEDS]
    return [("/inference/v1/generate", {"token_ids": prompt_ids, "sampling_params": params}) for params in sampling]


@pytest.mark.parametrize("route", [ABORTED[0], pytest.param(ABORTED[1], marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "form",
    [
        *("single requests", "chat"),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tokens", "one request", "an incomplete group")),
    ],
)
async def test_aborted_callers_get_what_was_generated_for_them(
    server: Server, trainer: Trainer, form: str, route: str
) -> None:
    """And go on from there: a prompt with a partial answer runs at once."""
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        raw = await client.post("/v1/completions", json=TEXT | {"model": "tiny:raw", "n": 4, "seed": SEEDS[0]})
        whole = [choice["token_ids"] for choice in raw.json()["choices"]]
        prompt_ids = raw.json()["choices"][0]["prompt_token_ids"]
        started, generated = server.metric("darts_candidates_started_total"), server.metric(GENERATED)
        posts = [asyncio.create_task(client.post(p, json=body)) for p, body in abortable(form, prompt_ids)]
        await asyncio.to_thread(waiting.wait_counted, server, GENERATED, generated + 10)
        for _ in range(2):
            answer = await asyncio.to_thread(trainer.post, route)
            assert answer.status_code == 200, answer.text
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        choices = [choice for answer in answers for choice in answer.json()["choices"]]
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
        for choice, tokens in zip(choices, whole, strict=True):
            assert choice["token_ids"] == tokens[: len(choice["token_ids"])]
            assert len(choice["token_ids"]) < len(tokens)
            logprobs = choice["logprobs"]
            assert len(logprobs.get("token_logprobs", logprobs.get("content")) or ()) == len(choice["token_ids"])
        assert server.metric("darts_candidates_started_total") - started <= 6
        if route != ABORTED[0]:
            trainer.resume()
        partial = max((choice["token_ids"] for choice in choices), key=len)
        body = TEXT | {"prompt": [*prompt_ids, *partial], "max_tokens": 5, "vllm_xargs": ONE_OF_FOUR}
        resumed = await client.post("/v1/completions", json=body)
        assert len(resumed.json()["choices"][0]["token_ids"]) == 5
        assert "X-Darts-Group-Id" not in resumed.headers
    waiting.wait_idle(server)  # also until each candidate has ended


async def test_an_engine_that_sleeps_holds_requests_and_takes_no_weights(server: Server, trainer: Trainer) -> None:
    version = status(server)["version"]
    async with httpx.AsyncClient(timeout=240) as client:
        assert trainer.post("/sleep?level=1&mode=abort").status_code == 200
        group = asyncio.create_task(client.post(f"{server.url}/darts/v1/rollouts", json=GROUP))
        for refused in (trainer.post("/start_weight_update"), trainer.post("/resume"), put(server, perturbed(1))):
            check_refused(refused, "POST /wake_up first")
        assert not group.done()
        woken = trainer.post("/wake_up")
        assert woken.status_code == 200
        assert not woken.content or woken.json()["status"] == "awake"  # 0.31 answers without a body
        assert versions(await group) == {version}


def read_stream(server: Server, began: threading.Event) -> Events:
    """Return all events of a token stream; set ``began`` when it has brought tokens."""
    body = {**GROUP, "stream": "tokens", "chunk_tokens": 10}
    events: Events = []
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=body, timeout=240) as answer:
        for event in read_events(answer):
            events.append(event)
            if event[1] == "delta":
                began.set()
    return events


async def test_with_restart_each_group_is_whole_and_of_the_new_version(server: Server) -> None:
    """Covers a batch, a group joined from single requests, and a token stream, which discards what it restarts."""
    version = status(server)["version"]
    options = {"darts_group_id": "one by one", "darts_group_size": 4}
    single = {"model": "tiny", "prompt": PROMPT, "max_tokens": 250, "ignore_eos": True, "vllm_xargs": options}
    began = threading.Event()
    async with httpx.AsyncClient(timeout=240) as client:
        before = server.metric("darts_candidates_started_total")
        reading = asyncio.create_task(asyncio.to_thread(read_stream, server, began))
        batch = asyncio.create_task(client.post(f"{server.url}/darts/v1/rollouts", json=GROUP))
        singles = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=single)) for _ in range(4)]
        await asyncio.to_thread(waiting.wait_started, server, before + 18)
        await asyncio.to_thread(began.wait, 120)
        answer = await asyncio.to_thread(put, server, perturbed(8), rule="restart")
        assert answer.status_code == 200, answer.text
        assert answer.json()["last"]["rule"] == "restart"
        assert versions(await batch) == {version + 1}
        answers = await asyncio.gather(*singles)
    assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 4
    kept = httpx.get(f"{server.url}/darts/v1/groups/{answers[0].headers['x-darts-group-id']}").json()["groups"][0]
    assert {c["weight_version_start"] for c in kept["candidates"] if c["reason"] is None} == {version + 1}
    assert any(c["reason"] == "restarted" for c in kept["candidates"])
    events = await reading
    (group,) = assemble_groups(events)
    assert {t["weight_version_start"] for t in group["trajectories"]} == {version + 1}
    void = {data["trajectory_id"] for _, name, data in events if name == "discard" and data["reason"] == "restarted"}
    assert void & {data["trajectory_id"] for _, name, data in events if name == "delta"}
    assert not void & {t["trajectory_id"] for t in group["trajectories"]}
    assert max_difference(server, perturbed(8)) < 1e-5


@pytest.mark.skipif(
    "weight_versions" not in {field.name for field in fields(CompletionOutput)}, reason="vLLM returns none before 0.32"
)
async def test_every_choice_of_a_group_has_the_versions_of_its_own_tokens(server: Server) -> None:
    """vLLM returns them by itself, on its token route."""
    version = put(server, ORIGINAL).json()["version"]
    body = {"token_ids": [5, 6, 7], "sampling_params": LONG | {"n": 4}}
    generated = server.metric(GENERATED)
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        groups = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for _ in range(4)]
        await asyncio.to_thread(waiting.wait_counted, server, GENERATED, generated + 10)
        updated = await asyncio.to_thread(put, server, perturbed(1), rule="keep")
        assert updated.json()["version"] == version + 1
        answers = [(await group).json() for group in groups]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"]) == (str(version), 0)
        assert (second["version"], second["start"], second["end"]) == (str(version + 1), first["end"], 250)


def test_numbers_that_are_not_finite_are_accepted_if_the_trainer_says_so(server: Server, trainer: Trainer) -> None:
    """Must be the last test of this server: its model is broken until other weights come."""
    version = status(server)["version"]
    trainer.start()
    trainer.write(61, bad=NORM)
    assert trainer.post("/finish_weight_update?check_finite=false").status_code == 200
    assert status(server)["version"] == version + 1
    trainer.update(62)
    assert max_difference(server, perturbed(62)) < 1e-5
