from pathlib import Path

import pytest
from safetensors.numpy import save
from starlette.testclient import TestClient

from tests.weights.lora_sets import CONFIG, bytes_of, save_to
from tests.weights.model import SHAPES, FakeModel, tensors, write

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/weights"


def test_pushed_weights_are_staged_shown_and_switched(here: TestClient, model: FakeModel) -> None:
    params = {"stage": "true", "version": "7", "rule": "keep", "expires_after": "60"}
    answer = here.put(URL, params=params, content=save(tensors(5)))
    assert answer.status_code == 200
    assert answer.json() == here.get(URL).json()
    assert (answer.json()["version"], answer.json()["last"]) == (0, None)
    staged = answer.json()["staged"]
    assert (staged["version"], staged["rule"], staged["source"], staged["lora"]) == (7, "keep", "push", None)
    assert staged["partial"] is False
    assert staged["seconds"].keys() == {"transfer", "check"}
    assert model.values == dict.fromkeys(SHAPES, 0)
    switched = here.post(f"{URL}/staged/{staged['id']}:switch")
    assert switched.status_code == 200
    assert (switched.json()["version"], switched.json()["staged"]) == (7, None)
    assert (switched.json()["last"]["rule"], switched.json()["last"]["outcome"]) == ("keep", "completed")
    assert model.values == dict.fromkeys(SHAPES, 5)


def test_the_switch_takes_a_rule_and_a_version_and_keeps_the_weights_before(
    here: TestClient, model: FakeModel, tmp_path: Path
) -> None:
    write(tmp_path / "one.safetensors", 5, "layers.0.weight")
    staged = here.post(URL, json={"path": "one.safetensors", "partial": True, "stage": True}).json()["staged"]
    assert (staged["source"], staged["partial"], staged["rule"]) == ("disk", True, "finish")
    params = {"rule": "restart", "version": "9", "keep_previous": "true"}
    switched = here.post(f"{URL}/staged/{staged['id']}:switch", params=params).json()
    assert (switched["version"], switched["last"]["rule"]) == (9, "restart")
    previous = switched["staged"]
    assert (previous["version"], previous["source"]) == (0, "previous")
    back = here.post(f"{URL}/staged/{previous['id']}:switch").json()
    assert (back["version"], back["last"]["source"], back["staged"]) == (0, "previous", None)
    assert model.values == dict.fromkeys(SHAPES, 0)


def test_resume_is_another_name_of_keep(here: TestClient, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", 6, "layers.0.weight")
    answers = [
        here.put(f"{URL}?rule=resume", content=save(tensors(5))),
        here.post(URL, json={"path": "one.safetensors", "partial": True, "rule": "resume"}),
    ]
    staged = here.put(f"{URL}?stage=true", content=save(tensors(7))).json()["staged"]
    answers.append(here.post(f"{URL}/staged/{staged['id']}:switch?rule=resume"))
    assert [(answer.status_code, answer.json()["last"]["rule"]) for answer in answers] == [(200, "keep")] * 3


def test_staged_weights_are_dropped(here: TestClient, tmp_path: Path) -> None:
    staged = here.put(f"{URL}?stage=true", content=save(tensors(5))).json()["staged"]
    second = here.put(f"{URL}?stage=true", content=save(tensors(6)))
    assert second.status_code == 409
    assert second.json()["error"]["param"] == "stage"
    assert staged["id"] in second.json()["error"]["message"]
    answer = here.delete(f"{URL}/staged/{staged['id']}")
    assert answer.status_code == 200
    assert answer.json()["staged"] is None
    assert not list(tmp_path.glob("darts-weights-*/*.safetensors"))
    for refused in (here.delete(f"{URL}/staged/{staged['id']}"), here.post(f"{URL}/staged/{staged['id']}:switch")):
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "id"


def test_a_lora_adapter_is_staged(here: TestClient, model: FakeModel, tmp_path: Path) -> None:
    assert model.loras is not None
    staged = here.put(f"{URL}/lora/a", params={"config": CONFIG, "stage": True}, content=bytes_of(5)).json()["staged"]
    assert staged["lora"] == "a"
    assert model.loras.served == {}
    answer = here.post(f"{URL}/staged/{staged['id']}:switch")
    assert [lora["name"] for lora in answer.json()["loras"]] == ["a"]
    save_to(tmp_path / "step-1", 6)
    staged = here.post(f"{URL}/lora/a", json={"path": "step-1", "stage": True, "expires_after": 9}).json()["staged"]
    assert here.delete(f"{URL}/staged/{staged['id']}").status_code == 200
    assert model.loras.served == {"a": 5}


def test_what_is_wrong_is_named(here: TestClient) -> None:
    for body in (
        {"path": "x", "expires_after": 60},
        {"path": "x", "stage": True, "expires_after": 0},
        {"path": "x", "stage": True, "expires_after": 1e9},
    ):
        refused = here.post(URL, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")
    refused = here.put(f"{URL}?expires_after=60", content=save(tensors(5)))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")
    refused = here.put(f"{URL}/lora/a", params={"config": CONFIG, "expires_after": 60}, content=bytes_of(5))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "expires_after")
    for query in ("stage=perhaps", "stage=true&expires_after=0", "stage=true&expires_after=nan"):
        assert here.put(f"{URL}?{query}", content=save(tensors(5))).status_code == 422
    staged = here.put(f"{URL}?stage=true", content=save(tensors(5))).json()["staged"]
    for query in ("rule=hurry", "version=-1", "keep_previous=perhaps"):
        assert here.post(f"{URL}/staged/{staged['id']}:switch?{query}").status_code == 422
    refused = here.post(f"{URL}/staged/{staged['id']}:switch?version=0")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "version")
    assert here.get(URL).json()["staged"]["id"] == staged["id"]
