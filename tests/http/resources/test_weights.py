import math
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from safetensors.numpy import save
from starlette.testclient import TestClient

from darts_server.exceptions import UpdateFailed, UpdateUnsupported
from darts_server.weights.updates import Updates
from tests.weights.lora_sets import CONFIG, bytes_of, save_to
from tests.weights.model import SHAPES, FakeModel, tensors, write

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/weights"
LORA_URL = f"{URL}/lora/a"


def test_a_pushed_file_is_served_with_the_version_that_was_requested(here: TestClient, model: FakeModel) -> None:
    answer = here.put(f"{URL}?version=7&rule=keep", content=save(tensors(5)))
    assert answer.status_code == 200
    assert model.values == dict.fromkeys(SHAPES, 5)
    body = answer.json()
    assert body == here.get(URL).json()
    assert (body["version"], body["state"], body["rule"], body["last_error"]) == (7, "serving", "finish", None)
    last = body["last"]
    assert (last["version"], last["outcome"], last["source"], last["rule"]) == (7, "completed", "push", "keep")
    assert last["seconds"].keys() == {"transfer", "check", "pause", "load", "resume"}


def test_a_file_at_a_path_is_served(here: TestClient, model: FakeModel, tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", 5, "layers.0.weight")
    answer = here.post(URL, json={"path": "one.safetensors", "partial": True, "rule": "keep"})
    assert (answer.status_code, answer.json()["last"]["rule"]) == (200, "keep")
    assert model.values == {**dict.fromkeys(SHAPES, 0), "layers.0.weight": 5}
    assert answer.json()["last"]["partial"] is True


def test_there_is_no_last_update_at_first(here: TestClient) -> None:
    assert here.get(URL).json() == {
        "version": 0,
        "state": "serving",
        "intact": True,
        "rule": "finish",
        "loras": [],
        "last": None,
        "last_error": None,
    }


def test_a_bad_body_is_a_400_and_is_reported_later_too(here: TestClient, model: FakeModel) -> None:
    answer = here.put(URL, content=save(tensors(5, extra=(1,))))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body"
    assert here.get(URL).json()["last_error"] == answer.json()["error"]["message"]
    assert model.values == dict.fromkeys(SHAPES, 0)
    assert here.put(f"{URL}?rule=keep", content=save(tensors(5))).json()["last_error"] is None


def test_a_body_that_is_larger_than_any_valid_set_is_too_large(here: TestClient, tmp_path: Path) -> None:
    answer = here.put(URL, content=b"", headers={"content-length": str(10**12)})
    assert answer.status_code == 413
    assert not list(tmp_path.glob("darts-weights-*/*.safetensors"))


@pytest.mark.parametrize("query", ["rule=hurry", "version=-1", "version=x", "partial=perhaps"])
def test_wrong_parameters_are_refused(here: TestClient, query: str) -> None:
    assert here.put(f"{URL}?{query}", content=save(tensors(5))).status_code == 422
    assert here.get(URL).json()["version"] == 0


def test_faults_have_statuses_of_their_own(here: TestClient, updates: Updates, model: FakeModel) -> None:
    def status() -> int:
        return here.put(URL, content=save(tensors(5))).status_code

    model.fail["checkpoint_tensors"] = [UpdateUnsupported("quantized")]
    assert status() == 501
    assert here.portal is not None
    here.portal.call(updates.external.start, AsyncMock())
    assert status() == 409
    with pytest.raises(UpdateFailed):
        here.portal.call(updates.external.finish, AsyncMock(side_effect=UpdateFailed("broken")))
    model.fail["load"] = [UpdateFailed("broken")]
    assert status() == 503
    assert status() == 200
    model.fail["load"] = [UpdateFailed("broken"), UpdateFailed("broken")]
    assert status() == 503
    assert here.get(URL).json()["state"] == "lost"


def test_an_adapter_is_pushed_named_and_removed(here: TestClient, tmp_path: Path) -> None:
    answer = here.put(LORA_URL, params={"config": CONFIG, "version": 7, "rule": "keep"}, content=bytes_of(5))
    assert answer.status_code == 200
    body = answer.json()
    assert body == here.get("/darts/v1/weights").json()
    assert body["loras"] == [{"name": "a", "version": 7, "rank": 2, "scale": 1.0}]
    assert (body["last"]["lora"], body["last"]["source"], body["last"]["rule"]) == ("a", "push", "keep")
    save_to(tmp_path / "step-1", 6)
    assert here.post(LORA_URL, json={"path": "step-1"}).json()["last"]["source"] == "disk"
    assert here.delete(LORA_URL).json()["loras"] == []
    assert here.delete(LORA_URL).status_code == 404


def test_errors_of_an_adapter_name_the_problem(here: TestClient) -> None:
    for answer, field in (
        (here.put(LORA_URL, params={"config": "?"}, content=bytes_of(5)), "config"),
        (here.put(LORA_URL, params={"config": CONFIG}, content=b""), "body"),
        (here.post(LORA_URL, json={"path": "../x"}), "path"),
        (here.post(LORA_URL, json={"path": "x", "partial": True}), "partial"),
        (here.put("/darts/v1/weights/lora/model", params={"config": CONFIG}, content=bytes_of(5)), "name"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert here.put(LORA_URL, content=bytes_of(5)).status_code == 422
    for name in (".a", "a:raw", "a%20b", "a" * 101):
        url = f"/darts/v1/weights/lora/{name}"
        assert here.put(url, params={"config": CONFIG}, content=bytes_of(5)).status_code == 422
    large = {"content-length": str(10**12)}
    assert here.put(LORA_URL, params={"config": CONFIG}, content=b"", headers=large).status_code == 413
    assert here.get("/darts/v1/weights").json()["version"] == 0


def test_numbers_are_checked_unless_the_request_disables_it(here: TestClient, model: FakeModel, tmp_path: Path) -> None:
    bad = save(tensors(math.inf))
    (tmp_path / "bad.safetensors").write_bytes(bad)
    save_to(tmp_path / "lora", math.inf)
    no = {"check_finite": "false"}
    for refused, accepted in (
        (here.put(URL, content=bad), here.put(URL, params=no, content=bad)),
        (
            here.post(URL, json={"path": "bad.safetensors"}),
            here.post(URL, json={"path": "bad.safetensors", "check_finite": False}),
        ),
        (
            here.put(LORA_URL, params={"config": CONFIG}, content=bytes_of(math.inf)),
            here.put(LORA_URL, params={"config": CONFIG, **no}, content=bytes_of(math.inf)),
        ),
        (
            here.post(LORA_URL, json={"path": "lora"}),
            here.post(LORA_URL, json={"path": "lora", "check_finite": False}),
        ),
    ):
        assert refused.status_code == 400
        assert "has NaN or infinity" in refused.json()["error"]["message"]
        assert accepted.status_code == 200
    assert here.get(URL).json()["version"] == 4
    assert model.values == dict.fromkeys(SHAPES, math.inf)


def test_the_served_version_is_accepted_if_the_request_repeats_it(
    here: TestClient, model: FakeModel, tmp_path: Path
) -> None:
    (tmp_path / "initial.safetensors").write_bytes(save(tensors(3)))
    body = {"path": "initial.safetensors", "version": 0}
    assert here.post(URL, json=body).json()["error"]["param"] == "version"
    assert here.post(URL, json=body | {"repeat_version": True}).json()["version"] == 0
    assert model.values == dict.fromkeys(SHAPES, 3)
