"""Weight updates of a real engine by each transport, against the same weights in transformers."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from darts_server.files import stamp_of
from darts_server.offline.demo.server import DARTS, MODEL, Server
from tests.integration import waiting
from tests.integration.events import Events, assemble_groups, read_events
from tests.integration.fork_server import Serve
from tests.integration.weights import (
    EMBEDDING,
    HEAD,
    ORIGINAL,
    PROMPT,
    check_served,
    is_same,
    max_difference,
    perturbed,
    post,
    put,
    sample,
    status,
    wait_announced,
)

pytestmark = pytest.mark.engine
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(serve: Serve, root: Path) -> Iterator[Server]:
    """A server of its own: the shared one keeps its weights."""
    flags = (
        *("--weights-root", str(root)),
        *("--worker-extension-cls", "tests.integration.extension.UserExtension", "--allow-dangerous-routes"),
        *("--dialect", "areal,prime-rl"),
    )
    with serve(DARTS, root.parent / "weights.log", *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


def test_pushed_weights_are_served_and_the_original_ones_sample_as_before(server: Server) -> None:
    before = sample(server)
    assert max_difference(server, ORIGINAL) < 1e-5
    version = status(server)["version"]
    last = check_served(server, put(server, perturbed(1)), perturbed(1))
    assert not is_same(sample(server), before)
    assert last["outcome"] == "completed"
    assert last["seconds"].keys() == {"transfer", "check", "wait", "pause", "load", "resume"}
    assert last["version"] == version + 1
    assert server.metric("darts_weight_version") == version + 1
    assert httpx.get(f"{server.url}/weight_info").json()["weight_version"] == str(version + 1)
    assert put(server, ORIGINAL, version=1000, rule="keep").json()["version"] == 1000
    assert is_same(sample(server), before)


def test_good_weights_sample_as_before_after_weights_that_overflow(server: Server) -> None:
    put(server, ORIGINAL)
    # Longer than a block of the KV cache, and answers that fill many blocks.
    prompts = [([10, 13, 23, 8, 14, 24, 7] * 40)[start : start + 150] for start in range(7)]
    body = {"model": "tiny:raw", "max_tokens": 16, "temperature": 0, "return_token_ids": True}

    def greedy() -> list[list[int]]:
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": prompts}, timeout=240).json()
        assert "choices" in answer, answer
        return [choice["token_ids"] for choice in answer["choices"]]

    before = greedy()
    norm = "model.layers.0.post_attention_layernorm.weight"
    assert put(server, ORIGINAL | {norm: torch.full_like(ORIGINAL[norm], 3e38)}).status_code == 200
    more = {"prompt": PROMPT, "n": 16, "max_tokens": 200, "ignore_eos": True, "temperature": 1}
    broken = httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=240).json()
    assert all(set(choice["token_ids"]) == {0} for choice in broken["choices"])
    put(server, ORIGINAL)
    for _ in range(3):
        assert greedy() == before


def test_weights_are_loaded_from_files_and_folders_also_by_the_routes_of_trainers(server: Server, root: Path) -> None:
    for seed in (2, 41):
        save_file(perturbed(seed), root / f"{seed}.safetensors")
    (root / "40").mkdir()
    names = sorted(ORIGINAL)
    for part in (0, 1):
        save_file({n: perturbed(40)[n] for n in names[part::2]}, root / "40" / f"{part}.safetensors")
    assert check_served(server, post(server, "2.safetensors"), perturbed(2))["source"] == "disk"
    calls: dict[int, dict[str, dict[str, str]]] = {
        40: {"pause?mode=keep&clear_cache=false": {}, "update_weights": {"weight_dir": str(root / "40")}, "resume": {}},
        41: {
            "areal_pause_generation": {},
            "areal_update_weights": {"model_path": str(root / "41.safetensors")},
            "areal_continue_generation": {},
        },
    }
    for seed, bodies in calls.items():
        for route, body in bodies.items():
            answer = httpx.post(f"{server.url}/{route}", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
        assert max_difference(server, perturbed(seed)) < 1e-5


@pytest.mark.nightly
def test_tensors_missing_from_a_partial_set_stay(server: Server, root: Path) -> None:
    check_served(server, put(server, perturbed(4)), perturbed(4))
    mixed = perturbed(4) | {QUERY: perturbed(5)[QUERY]}
    check_served(server, put(server, {QUERY: perturbed(5)[QUERY]}, partial=True), mixed)
    mixed |= {EMBEDDING: perturbed(6)[EMBEDDING]}
    save_file({EMBEDDING: perturbed(6)[EMBEDDING]}, root / "part.safetensors")
    check_served(server, post(server, "part.safetensors", partial=True), mixed)
    (root / "part.safetensors").unlink()
    answer = put(server, {QUERY: perturbed(5)[QUERY]}, partial=True)
    assert answer.status_code == 400
    assert "has changed since; send a full set" in answer.json()["error"]["message"]
    assert max_difference(server, mixed) < 1e-5


def test_a_tied_head_and_another_precision_are_accepted(server: Server) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in perturbed(7).items()}
    answer = put(server, weights | {HEAD: weights[EMBEDDING].clone()})
    check_served(server, answer, {name: tensor.float() for name, tensor in weights.items()})


def test_invalid_sets_are_rejected_and_change_nothing(server: Server, root: Path) -> None:
    check_served(server, put(server, perturbed(8)), perturbed(8))
    before, version = sample(server), status(server)["version"]
    refused = server.metric("darts_weight_updates_total", outcome="refused")
    whole = save(perturbed(9))
    infinite = perturbed(9)
    infinite[QUERY][3, 5] = torch.inf
    save_file(infinite, root / "infinite.safetensors")
    by_path = {"weight_dir": str(root / "infinite.safetensors")}
    for answer, words in (
        (put(server, whole[:-100]), "not a whole safetensors file"),
        (put(server, perturbed(9) | {QUERY: torch.zeros(128, 127)}), f"tensor {QUERY} is F32 of shape [128, 127]"),
        (put(server, perturbed(9), version=version), "version: is"),
        (post(server, str(MODEL / "model.safetensors")), "is outside"),
        (put(server, infinite), f"tensor {QUERY} has NaN or infinity"),
        (put(server, {QUERY: infinite[QUERY]}, partial=True), f"tensor {QUERY} has NaN or infinity"),
        (post(server, "infinite.safetensors"), f"tensor {QUERY} has NaN or infinity"),
        (httpx.post(f"{server.url}/update_weights", json=by_path), f"tensor {QUERY} has NaN or infinity"),
    ):
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
    assert is_same(sample(server), before)
    assert status(server)["version"] == version
    assert status(server)["state"] == "serving"
    assert server.metric("darts_weight_updates_total", outcome="refused") >= refused + 7


def make_link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "outside.safetensors")


@pytest.mark.parametrize("make", [make_link, os.mkfifo])
@pytest.mark.parametrize("file", ["shard.bin", "shard.safetensors"])
def test_links_and_pipes_under_the_root_are_refused_at_once(
    server: Server, root: Path, make: Callable[[Path], None], file: str
) -> None:
    """Also where an index names them. A pipe that is opened for reading would stop the whole server for good."""
    save_file(perturbed(1), root.parent / "outside.safetensors")
    folder = root / f"{make.__name__}-{file}"
    folder.mkdir()
    make(folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(ORIGINAL, file)}))
    for path in (folder.name, f"{folder.name}/{file}"):
        refused = post(server, path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path"), refused.text
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.mark.anyio
async def test_a_client_that_dies_while_it_sends_changes_nothing(server: Server) -> None:
    version, whole = status(server)["version"], save(perturbed(9))
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    head = f"PUT /darts/v1/weights HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(whole)}\r\n\r\n"
    writer.write(head.encode() + whole[:100_000])
    await writer.drain()
    while status(server)["state"] != "staging":
        await asyncio.sleep(0.02)
    busy = put(server, whole)
    assert busy.status_code == 409
    assert "an update by push is in progress" in busy.json()["error"]["message"]
    writer.close()
    while (now := status(server))["state"] != "serving":
        await asyncio.sleep(0.02)
    assert now["version"] == version
    assert now["last"]["outcome"] == "refused"
    check_served(server, put(server, perturbed(1)), perturbed(1))


GROUPS = 16


@pytest.mark.anyio
@pytest.mark.parametrize("rule", [pytest.param("finish", marks=pytest.mark.nightly), "keep"])
async def test_no_group_is_lost_while_weights_change(server: Server, rule: str) -> None:
    """With ``finish`` no group mixes versions; with ``keep`` those that do are marked."""
    first = status(server)["version"]
    updates = 5 if rule == "keep" else 30
    sets = [save(ORIGINAL), save({name: tensor * 1.001 for name, tensor in ORIGINAL.items()})]
    done = asyncio.Event()
    groups: list[dict[str, Any]] = []
    body = {"prompts": [{"text": PROMPT}], "group_size": 4, "sampling": {"max_tokens": 40, "ignore_eos": True}}

    async def request_groups(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            answer = await client.post(f"{server.url}/darts/v1/rollouts", json=body)
            assert answer.status_code == 200, answer.text
            groups.extend(answer.json()["groups"])

    async with httpx.AsyncClient(timeout=240) as client:
        requests = [asyncio.create_task(request_groups(client)) for _ in range(GROUPS)]
        for number in range(updates):
            url = f"{server.url}/darts/v1/weights?rule={rule}"
            answer = await client.put(url, content=sets[number % 2])
            assert answer.status_code == 200, answer.text
        done.set()
        await asyncio.gather(*requests)
    assert status(server)["version"] == first + updates
    assert len(groups) >= GROUPS
    for group in groups:
        assert len(group["trajectories"]) == 4
        versions = {t[f"weight_version_{end}"] for t in group["trajectories"] for end in ("start", "end")}
        assert group["mixed_versions"] == (len(versions) > 1)
        assert rule == "keep" or len(versions) == 1
        for trajectory in group["trajectories"]:
            spans = trajectory["version_spans"]
            assert sum(tokens for _, tokens in spans) == trajectory["length"]
            assert [version for version, _ in spans] == sorted({version for version, _ in spans})
            assert trajectory["weight_version_start"] <= spans[0][0] <= spans[-1][0] <= trajectory["weight_version_end"]
    if rule == "keep":
        assert any(group["mixed_versions"] for group in groups)
        assert any(len(t["version_spans"]) > 1 for group in groups for t in group["trajectories"])


def test_with_keep_a_candidate_goes_on_as_the_new_weights_go_on_from_what_it_has(server: Server) -> None:
    """Nothing of the old weights is left but the tokens: caches are computed again."""
    put(server, ORIGINAL, rule="keep")
    prompt = [5, 6, 7, 8, 9]
    sampling = {"max_tokens": 250, "ignore_eos": True, "temperature": 0.0, "logprobs": True}
    body = {"group_size": 1, "sampling": sampling, "policy": {"name": "off"}}
    sent = body | {"prompts": [{"token_ids": prompt}], "stream": "tokens", "chunk_tokens": 10}
    events: Events = []
    new = save(perturbed(3))  # made before, so that they come long before the end
    with httpx.stream("POST", f"{server.url}/darts/v1/rollouts", json=sent, timeout=240) as answer:
        for event in read_events(answer):
            events.append(event)
            if event[1] == "delta" and event[2]["start"] == 0:
                put(server, new, rule="keep")
    [[trajectory]] = [group["trajectories"] for group in assemble_groups(events)]
    token_ids, logprobs = trajectory["token_ids"], trajectory["logprobs"]
    (_, before), (_, after) = trajectory["version_spans"]
    fresh = body | {
        "prompts": [{"token_ids": prompt + token_ids[:before]}],
        "sampling": sampling | {"max_tokens": after},
    }
    httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()  # it has the blocks of the first request
    answered = httpx.post(f"{server.url}/darts/v1/rollouts", json=fresh, timeout=240).json()
    [whole] = answered["groups"][0]["trajectories"]
    assert whole["token_ids"] == token_ids[before:]
    assert whole["logprobs"] == pytest.approx(logprobs[before:], abs=1e-4)
    put(server, ORIGINAL, rule="keep")


def tokenize(server: Server, text: str) -> list[int]:
    answer = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": text}, timeout=240)
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def test_what_was_carried_over_goes_on_as_the_new_weights_go_on_from_it(server: Server) -> None:
    """Tokens and log-probs before the seam are those of the old weights, and after it those of the new ones."""
    put(server, ORIGINAL)
    url = f"{server.url}/darts/v1/rollouts"
    texts = [f"{i}a+2b*3c-4d+5e*6f-7g+8h*9i-1a+3b*2c>" for i in range(1, 5)]
    prompts: list[dict[str, Any]] = [
        {"token_ids": tokenize(server, text), "key": f"across/{text}"} for text in ["1a+2>", *texts]
    ]
    sampling = {"max_tokens": 150, "temperature": 0.0, "logprobs": True}
    body: dict[str, Any] = {"group_size": 1, "sampling": sampling, "policy": {"name": "off"}}

    def run(**more: Any) -> dict[str, Any]:
        httpx.post(f"{server.url}/reset_prefix_cache").raise_for_status()
        answer = httpx.post(url, json=body | more, timeout=240)
        assert answer.status_code == 200, answer.text
        answered: dict[str, Any] = answer.json()
        return answered

    old = {group["prompt_key"]: group["trajectories"][0] for group in run(prompts=prompts)["groups"]}
    first = run(prompts=prompts, num_groups=1, carry="resume")
    version = status(server)["version"]
    stopped = httpx.get(f"{server.url}/darts/v1/groups/{first['id']}").json()["groups"]
    kept = {
        group["prompt_key"]: candidate["length"]
        for group in stopped
        for candidate in group["candidates"]
        if candidate["reason"] == "carried"
    }
    put(server, perturbed(3))
    again = [prompts[prompt["number"]] for prompt in first["unfinished"]]
    token_ids = {prompt["key"]: prompt["token_ids"] for prompt in again}
    groups = run(prompts=again, carry="resume")["groups"]
    assert len(groups) == 4
    # On a busy machine the first batch may end before some candidates have their first token.
    assert all(group["mixed_versions"] or not kept[group["prompt_key"]] for group in groups)
    groups = [group for group in groups if group["mixed_versions"]]
    assert groups
    differ = []
    for group in groups:
        [trajectory] = group["trajectories"]
        [[first_version, before], [last_version, rest_length]] = trajectory["version_spans"]
        length = trajectory["length"]
        assert (first_version, last_version, before + rest_length) == (version, version + 1, length)
        # A token may come after the group was recorded, and before the engine's client has handled the abort.
        assert kept[group["prompt_key"]] <= before < length
        tokens, logprobs = trajectory["token_ids"], trajectory["logprobs"]
        earlier = old[group["prompt_key"]]
        assert tokens[:before] == earlier["token_ids"][:before]
        assert logprobs[:before] == pytest.approx(earlier["logprobs"][:before], abs=1e-4)
        prompt = {"token_ids": token_ids[group["prompt_key"]] + tokens[:before]}
        [fresh] = run(prompts=[prompt], sampling=sampling | {"max_tokens": length - before})["groups"]
        [rest] = fresh["trajectories"]
        assert rest["token_ids"] == tokens[before:]
        assert rest["logprobs"] == pytest.approx(logprobs[before:], abs=1e-4)
        differ.append(logprobs[before:] != pytest.approx(earlier["logprobs"][before:length], abs=1e-3))
    assert any(differ), "of one that has only its end left, both weights may be certain"
    put(server, ORIGINAL)


# These leave NaN in the KV cache, and come last: an answer of a later test was once NaN, on a busy machine.


def test_weights_that_produce_nan_are_reported_as_broken(server: Server) -> None:
    """A caller switched the check of numbers off; a trainer must not train on what such weights generate."""
    broken = ORIGINAL | {NORM: torch.full_like(ORIGINAL[NORM], torch.nan)}
    assert put(server, broken).status_code == 400
    assert put(server, broken, check_finite=False).status_code == 200
    body: dict[str, Any] = {
        "prompts": [{"text": PROMPT}],
        "group_size": 2,
        "sampling": {"max_tokens": 8, "logprobs": 0},
    }
    answer = httpx.post(f"{server.url}/darts/v1/rollouts", json=body, timeout=240)
    assert "are NaN: the model's weights are broken" in answer.text
    body = {"model": "tiny", "prompt": PROMPT, "n": 2, "max_tokens": 8, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 500
    assert "are NaN: the model's weights are broken" in answer.text
    assert put(server, ORIGINAL).status_code == 200
    assert max_difference(server, ORIGINAL) < 1e-5


def test_an_engine_survives_a_load_that_fails_half_way_and_a_full_load_repairs_it(server: Server, root: Path) -> None:
    """The server does the same when files that it has checked can no longer be read."""
    names = sorted(ORIGINAL)
    save_file(perturbed(1), root / "whole.safetensors")
    whole = root / "whole.safetensors"
    stamp = list(stamp_of(whole))
    plans = [[str(whole), stamp, names[:9]], [str(root / "nothing.safetensors"), stamp, names[9:]]]
    call = {"method": "darts_load_weights", "args": [plans]}
    error, *_ = httpx.post(f"{server.url}/collective_rpc", json=call, timeout=240).json()["results"]
    assert "nothing.safetensors" in error
    # Without log-probs: those of half-loaded weights may be NaN.
    alive = {"model": "tiny:raw", "prompt": PROMPT, "max_tokens": 5}
    httpx.post(f"{server.url}/v1/completions", json=alive, timeout=240).raise_for_status()
    check_served(server, put(server, ORIGINAL), ORIGINAL)


@pytest.mark.anyio
@pytest.mark.nightly
async def test_after_lost_weights_health_says_so(server: Server, root: Path) -> None:
    """Must be the last test. New weights change while a group is waited for, and the old ones are gone."""
    old, new = root / "old.safetensors", root / "new.safetensors"
    for path, seed in ((old, 1), (new, 2)):
        save_file(perturbed(seed), path)
    assert post(server, old.name).status_code == 200
    old.unlink()
    body = {"prompts": [{"text": PROMPT}] * 4, "group_size": 4, "sampling": {"max_tokens": 300, "ignore_eos": True}}
    before = server.metric("darts_candidates_started_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        group = asyncio.create_task(client.post("/darts/v1/rollouts", json=body))
        await asyncio.to_thread(waiting.wait_started, server, before + 1)
        update = asyncio.create_task(client.post("/darts/v1/weights", json={"path": new.name}))
        await asyncio.to_thread(wait_announced, server, update)
        save_file(perturbed(3), new)
        assert (await group).status_code == 200
        lost = await update
        assert lost.status_code == 503
        assert "has changed since it was checked" in lost.json()["error"]["message"]
        for route in ("/health", "/ping"):
            answer = await client.get(route)
            assert answer.status_code == 503, route
            assert "restoring the old weights failed too" in answer.json()["error"]["message"]
        assert (await client.post("/darts/v1/rollouts", json=body)).status_code == 503
        assert status(server)["state"] == "lost"
