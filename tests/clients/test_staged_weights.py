"""Weights that both clients stage, switch and drop: over a recording transport, and on the server's own routes."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save

from darts_client import AsyncClient, BadRequest, Client, NotFound, ProtocolError, StagedRecord
from tests.weights.lora_sets import CONFIG, bytes_of
from tests.weights.model import SHAPES, FakeModel, tensors, write

from .test_weights import UPDATE, WEIGHTS
from .vllm_answers import URL

STAGED: dict[str, Any] = {
    "id": "ab12",
    "version": 8,
    "source": "push",
    "lora": None,
    "rule": "finish",
    "partial": False,
    "expires_at": 1.5,
    "seconds": {"transfer": 1},
}


class Recorder(httpx.BaseTransport):
    """Records requests. ``staged``: of its answers."""

    def __init__(self, staged: dict[str, Any] | None = STAGED) -> None:
        self.staged = staged
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().partition("?")[0]
        self.requests.append((request.method, path, dict(request.url.params), request.read()))
        return httpx.Response(200, json=WEIGHTS | {"staged": self.staged, "last": UPDATE})


def test_options_are_sent_only_if_given() -> None:
    server = Recorder()
    options: dict[str, Any] = {"rule": "keep", "version": 0, "partial": True, "expires_after": 60}
    with Client(URL, transport=server) as client:
        staged = client.weights.stage(b"w")
        assert staged == StagedRecord(**STAGED)
        client.weights.stage(path=Path("step 7"))
        client.weights.stage(path="step 7", **options)
        client.weights.stage(b"w", **options)
        client.weights.switch(staged)
        client.weights.switch("../x", rule="keep", version=0, keep_previous=True)
        client.weights.drop(staged)
    api, sent = "/darts/v1/weights", {"rule": "keep", "version": "0", "partial": "true"}
    assert [
        (*each[:3], json.loads(each[3]) if each[0] == "POST" and each[3] else each[3]) for each in server.requests
    ] == [
        ("PUT", api, {"partial": "false", "stage": "true"}, b"w"),
        ("POST", api, {}, {"path": "step 7", "partial": False, "stage": True}),
        ("POST", api, {}, {"path": "step 7", "stage": True, **options}),
        ("PUT", api, {**sent, "stage": "true", "expires_after": "60"}, b"w"),
        ("POST", f"{api}/staged/ab12:switch", {}, b""),
        (
            "POST",
            f"{api}/staged/%2E%2E%2Fx:switch",
            {"rule": "keep", "version": "0", "keep_previous": "true"},
            b"",
        ),
        ("DELETE", f"{api}/staged/ab12", {}, b""),
    ]


@pytest.mark.parametrize("sources", [{}, {"source": b"w", "path": "x"}])
def test_there_is_one_source(sources: dict[str, Any]) -> None:
    with Client(URL, transport=Recorder()) as client, pytest.raises(ValueError, match="one of source and path"):
        client.weights.stage(**sources)


def test_a_server_that_does_not_stage_is_an_error() -> None:
    with Client(URL, transport=Recorder(None)) as client, pytest.raises(ProtocolError, match="serves these now"):
        client.weights.stage(b"w")


def test_the_server_stages_switches_and_drops(url: str, model: FakeModel, tmp_path: Path) -> None:
    with Client(url) as client:
        staged = client.weights.stage(save(tensors(5)), version=7, expires_after=60)
        assert client.weights.get().staged == staged
        assert model.values == dict.fromkeys(SHAPES, 0)
        with pytest.raises(BadRequest, match="weights are staged already") as busy:
            client.weights.stage(save(tensors(6)))
        assert busy.value.status_code == 409
        record = client.weights.switch(staged, keep_previous=True)
        assert (record.version, record.staged and record.staged.source) == (7, "previous")
        assert model.values == dict.fromkeys(SHAPES, 5)
        assert record.staged is not None
        assert client.weights.switch(record.staged).version == 0
        assert model.values == dict.fromkeys(SHAPES, 0)
        write(tmp_path / "six.safetensors", 6)
        staged = client.weights.stage(path="six.safetensors")
        assert client.weights.drop(staged).staged is None
        with pytest.raises(NotFound, match="were dropped"):
            client.weights.switch(staged)


@pytest.mark.anyio
async def test_the_server_stages_a_lora_adapter(url: str, model: FakeModel) -> None:
    assert model.loras is not None
    async with AsyncClient(url) as client:
        staged = await client.weights.stage_lora("a", bytes_of(5), config=json.loads(CONFIG), rule="keep")
        assert (staged.lora, staged.rule, model.loras.served) == ("a", "keep", {})
        record = await client.weights.switch(staged)
    assert [lora.name for lora in record.loras] == ["a"]
    assert model.loras.served == {"a": 5}
