"""LoRA adapters on a real engine, against transformers with the adapter merged into the weights."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file
from vllm.platforms import current_platform

from darts_server.offline.demo.server import DARTS, Server
from tests.integration import waiting
from tests.integration.fork_server import Serve
from tests.integration.weights import (
    ORIGINAL,
    PROMPT,
    ROUNDING,
    Weights,
    is_same,
    max_difference,
    perturbed,
    put,
    sample,
    status,
    wait_announced,
)

pytestmark = pytest.mark.engine
LAYERS = sorted(name.removesuffix(".weight") for name in ORIGINAL if name.endswith("_proj.weight"))
RANK, ALPHA = 4, 8
BASE = "base_model.model."
SIZE = 0.035
"""Standard deviation of the matrices. Their product then changes the weights by about as much as `perturbed`."""
CONFIG = {"r": RANK, "lora_alpha": ALPHA}
FULL_CONFIG = {
    **CONFIG,
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "peft_version": "0.18.0",
}


DIALECTS = {
    "prime-rl": ("/load_lora_adapter", "lora_path"),
    "skyrl": ("/skyrl/v1/load_lora_adapter", "lora_path"),
    "areal": ("/areal_update_weights_lora", "lora_model_path"),
}
"""Each trainer's route for an adapter, and its field for the folder."""


def lora(seed: int, *kinds: str, rank: int = RANK) -> Weights:
    """Return random matrices for all layers, or for those of some kinds."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in LAYERS:
        outputs, inputs = ORIGINAL[f"{layer}.weight"].shape
        if not kinds or layer.endswith(kinds):
            tensors[f"{BASE}{layer}.lora_A.weight"] = SIZE * torch.randn(rank, inputs, generator=random)
            tensors[f"{BASE}{layer}.lora_B.weight"] = SIZE * torch.randn(outputs, rank, generator=random)
    return tensors


def merged(tensors: Weights, scale: float = ALPHA / RANK) -> Weights:
    """Return the weights of the model with the adapter, W + scale * B A, in float64."""
    weights = {name: tensor.double() for name, tensor in ORIGINAL.items()}
    for name, up in tensors.items():
        if name.endswith(".lora_B.weight"):
            down = tensors[name.replace("lora_B", "lora_A")].double()
            weights[name.removeprefix(BASE).replace(".lora_B", "")] += scale * up.double() @ down
    return weights


def lora_difference(server: Server, weights: Weights, model: str) -> float:
    """Return the largest difference of log-probs from the merged model in float64.

    In float32 merging alone may move them by as much: measured, 1.6e-5 with matrices of 0.05.
    """
    return max_difference(server, weights, model, torch.float64)


def push(server: Server, tensors: Weights | bytes, name: str = "ad", config: Any = CONFIG, **more: Any) -> Any:
    body = tensors if isinstance(tensors, bytes) else save(tensors)
    params = {"config": config if isinstance(config, str) else json.dumps(config), **more}
    return httpx.put(f"{server.url}/darts/v1/weights/lora/{name}", content=body, params=params, timeout=240)


def post(server: Server, path: str, name: str = "ad", **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/darts/v1/weights/lora/{name}", json={"path": path, **more}, timeout=240)


def delete(server: Server, name: str) -> httpx.Response:
    return httpx.delete(f"{server.url}/darts/v1/weights/lora/{name}", timeout=240)


def check_lora(server: Server, answer: httpx.Response, weights: Weights, name: str = "ad") -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    assert lora_difference(server, weights, f"{name}:raw") < ROUNDING
    last: dict[str, Any] = answer.json()["last"]
    return last


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(serve: Serve, root: Path) -> Iterator[Server]:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--weights-root", str(root), "--dialect", ",".join(DIALECTS))
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serve(DARTS, root.parent / "lora.log", *flags, env=env) as running:
        yield running


@pytest.mark.parametrize("model", ["tiny", "tiny:raw"])
def test_log_probs_of_a_prompt_which_kill_the_engine_on_cpu_are_refused(server: Server, model: str) -> None:
    if not current_platform.is_cpu():
        pytest.skip("vLLM computes them elsewhere")
    body = {"model": model, "prompt": PROMPT, "n": 2, "max_tokens": 8}
    refused = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt_logprobs": 1}, timeout=240)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=240).status_code == 200


def test_a_pushed_adapter_is_a_model_of_its_own_and_the_next_replaces_it(server: Server) -> None:
    base = sample(server)
    version = status(server)["version"]
    last = check_lora(server, push(server, lora(1)), merged(lora(1)))
    assert (last["lora"], last["source"], last["version"]) == ("ad", "push", version + 1)
    assert last["seconds"].keys() == {"transfer", "check", "wait", "pause", "load", "resume"}
    first = sample(server, "ad:raw")
    assert not is_same(first, base)
    assert status(server)["loras"] == [{"name": "ad", "version": version + 1, "rank": 4, "scale": 2.0}]
    check_lora(server, push(server, lora(2), version=50), merged(lora(2)))
    assert not is_same(sample(server, "ad:raw"), first)
    check_lora(server, push(server, lora(1), rule="keep"), merged(lora(1)))
    assert is_same(sample(server, "ad:raw"), first)
    assert is_same(sample(server), base)
    assert server.metric("darts_weight_version") == 51
    models = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert models == ["tiny", "tiny:raw", "ad", "ad:raw"]


@pytest.mark.nightly
def test_layers_ranks_scales_and_precisions_may_differ(server: Server) -> None:
    """Of fused layers an adapter may have one part only."""
    some = lora(3, "q_proj", "v_proj", "down_proj")
    check_lora(server, push(server, some, config=FULL_CONFIG), merged(some))
    wide = lora(4, "o_proj", "up_proj", rank=8)
    config = {"r": 8, "lora_alpha": 4, "use_rslora": True}
    check_lora(server, push(server, wide, config=config), merged(wide, 4 / math.sqrt(8)))
    half = {name: tensor.bfloat16() for name, tensor in lora(5).items()}
    check_lora(server, push(server, half), merged(half))


@pytest.mark.nightly
def test_adapters_are_served_beside_each_other(server: Server) -> None:
    """By default the engine has one slot, so each adapter is read from its files again when it is used."""
    check_lora(server, push(server, lora(6), "one"), merged(lora(6)), "one")
    check_lora(server, push(server, lora(7), "two"), merged(lora(7)), "two")
    for _ in range(2):
        assert lora_difference(server, merged(lora(6)), "one:raw") < ROUNDING
        assert lora_difference(server, merged(lora(7)), "two:raw") < ROUNDING
    for name in ("one", "two"):
        assert delete(server, name).status_code == 200
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "one", "prompt": PROMPT})
    assert answer.status_code == 404
    assert delete(server, "one").status_code == 404
    check_lora(server, push(server, lora(8), "one"), merged(lora(8)), "one")
    assert delete(server, "one").json()["last"]["source"] == "delete"


def test_a_folder_as_peft_writes_it_is_loaded(server: Server, root: Path) -> None:
    folder = root / "step-1"
    folder.mkdir()
    save_file(lora(9), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(FULL_CONFIG))
    assert check_lora(server, post(server, "step-1"), merged(lora(9)))["source"] == "disk"
    (folder / "adapter_model.safetensors").unlink()
    assert lora_difference(server, merged(lora(9)), "ad:raw") < ROUNDING
    answer = post(server, "step-1")
    assert answer.status_code == 400
    assert "must be a folder with adapter_config.json and adapter_model.safetensors" in answer.text


@pytest.mark.nightly
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_trainer_brings_adapters_by_its_own_route_and_the_next_replaces_it(
    server: Server, root: Path, dialect: str
) -> None:
    route, field = DIALECTS[dialect]
    version = status(server)["version"]
    for step in (1, 2):
        tensors, folder = lora(40 + step), root / f"{dialect}-{step}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(FULL_CONFIG))
        body = {"lora_name": dialect, field: str(folder)}
        answer = httpx.post(f"{server.url}{route}", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        assert lora_difference(server, merged(tensors), f"{dialect}:raw") < ROUNDING
        assert status(server)["version"] == version + step
    assert len(sample(server, dialect)) == 4
    assert delete(server, dialect).status_code == 200


@pytest.mark.nightly
def test_weights_and_foreign_adapters_are_rejected_with_reasons(server: Server, tmp_path: Path) -> None:
    answer = put(server, perturbed(1))
    assert answer.status_code == 501
    assert "--enable-lora" in answer.json()["error"]["message"]
    infinite = lora(14)
    name, tensor = next(iter(infinite.items()))
    tensor[0, 0] = math.inf
    save_file(lora(14), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(FULL_CONFIG))
    body = {"lora_name": "ad", "lora_path": str(tmp_path), "load_inplace": True}
    before = sample(server, "ad:raw")
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=240)
    assert "was pushed; push it again" in answer.text
    assert is_same(sample(server, "ad:raw"), before)
    body = {"lora_name": "theirs", "lora_path": str(tmp_path)}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=240).status_code == 200
    save_file(infinite, tmp_path / "adapter_model.safetensors")
    answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body | {"lora_name": "infinite"}, timeout=240)
    assert answer.status_code != 200
    assert f"tensor {name} has NaN or infinity" in answer.text
    save_file(lora(14), tmp_path / "adapter_model.safetensors")
    assert push(server, lora(14), "theirs").status_code == 409
    answer = push(server, infinite, "infinite")
    assert (answer.status_code, f"tensor {name} has NaN or infinity" in answer.text) == (400, True)
    assert push(server, lora(14), "..%2Fx").status_code in (404, 422)
    assert push(server, lora(14), "a%00b").status_code == 400
    assert lora_difference(server, merged(lora(14)), "theirs") < ROUNDING


@pytest.mark.nightly
def test_running_groups_complete_and_one_that_waits_for_a_removed_adapter_fails(server: Server) -> None:
    """Groups, pushes by each rule, and a removal at once: each caller gets a whole group, or an error with a reason."""
    assert push(server, lora(15), "busy").status_code == 200
    body = {"model": "busy", "prompt": PROMPT, "n": 8, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}

    def group(_: int) -> httpx.Response:
        headers = {"X-Darts-Policy": "uniform"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=240)

    started = server.metric("darts_candidates_started_total")

    def until_announced() -> httpx.Response:
        wait_announced(server, removal)
        return group(1)

    with ThreadPoolExecutor(8) as callers:
        answers = [callers.submit(group, index) for index in range(6)]
        waiting.wait_started(server, started + 4)
        for seed, rule in ((16, "restart"), (17, "keep"), (18, "finish")):
            assert push(server, lora(seed), "busy", rule=rule).status_code == 200
        for each in answers:
            answer = each.result()
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == 8
        assert lora_difference(server, merged(lora(18)), "busy:raw") < ROUNDING
        assert lora_difference(server, merged(lora(17)), "busy:raw") > 100 * ROUNDING
        started = server.metric("darts_candidates_started_total")
        # So many groups that they still run when the removal comes; it must not come before the last one has started.
        first = [callers.submit(group, index) for index in range(6)]
        waiting.wait_started(server, started + 5 * 12 + 1)
        removal = callers.submit(delete, server, "busy")
        late = callers.submit(until_announced)
        assert {each.result().status_code for each in first} == {200}
        assert removal.result().status_code == 200
        assert late.result().status_code == 404
    assert max_difference(server, ORIGINAL) < 1e-5
