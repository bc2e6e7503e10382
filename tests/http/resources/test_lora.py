from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.weights.lora_sets import CONFIG, bytes_of, save_to

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/weights/lora/a"


def test_an_adapter_is_pushed_named_and_removed(here: TestClient, tmp_path: Path) -> None:
    answer = here.put(URL, params={"config": CONFIG, "version": 7, "rule": "keep"}, content=bytes_of(5))
    assert answer.status_code == 200
    body = answer.json()
    assert body == here.get("/darts/v1/weights").json()
    assert body["loras"] == [{"name": "a", "version": 7, "rank": 2, "scale": 1.0}]
    assert (body["last"]["lora"], body["last"]["source"], body["last"]["rule"]) == ("a", "push", "keep")
    save_to(tmp_path / "step-1", 6)
    assert here.post(URL, json={"path": "step-1"}).json()["last"]["source"] == "disk"
    assert here.delete(URL).json()["loras"] == []
    assert here.delete(URL).status_code == 404


def test_what_is_wrong_is_named(here: TestClient) -> None:
    for answer, field in (
        (here.put(URL, params={"config": "?"}, content=bytes_of(5)), "config"),
        (here.put(URL, params={"config": CONFIG}, content=b""), "body"),
        (here.post(URL, json={"path": "../x"}), "path"),
        (here.post(URL, json={"path": "x", "partial": True}), "partial"),
        (here.put("/darts/v1/weights/lora/model", params={"config": CONFIG}, content=bytes_of(5)), "name"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert here.put(URL, content=bytes_of(5)).status_code == 422
    for name in (".a", "a:raw", "a%20b", "a" * 101):
        url = f"/darts/v1/weights/lora/{name}"
        assert here.put(url, params={"config": CONFIG}, content=bytes_of(5)).status_code == 422
    large = {"content-length": str(10**12)}
    assert here.put(URL, params={"config": CONFIG}, content=b"", headers=large).status_code == 413
    assert here.get("/darts/v1/weights").json()["version"] == 0
