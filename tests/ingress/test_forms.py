"""The form of a batch's answer through an ingress: of a divided one JSON, of one that runs on one server any."""

from typing import Any

import pytest
import safetensors.numpy

from darts_server.engine.scripted import Script
from darts_server.http.token_tensors import MEDIA_TYPE as TENSORS
from tests.ingress.scripted import PATH, SIZE, Cluster, batch, cluster

pytestmark = pytest.mark.anyio


def short(prompt: str, index: int) -> Script:
    return Script(3 + index)


async def post(running: Cluster, count: int, accept: str, key: str | None = None, **fields: Any) -> Any:
    headers = {"Accept": accept} | ({} if key is None else {"Idempotency-Key": key})
    return await running.ingress.post(PATH, batch(count, **fields), **headers)


async def test_a_divided_batch_is_json_and_one_on_one_server_has_tensors() -> None:
    async with cluster(2, short) as running:
        refused = await post(running, 4, TENSORS)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (406, "Accept")
        assert "Idempotency-Key" in error["message"]
        assert not any(server.parts for server in running.servers)

        divided = await post(running, 4, f"{TENSORS}, application/json;q=0.9")
        assert divided.headers["content-type"] == "application/json"
        assert [len(group["trajectories"]) for group in divided.json()["groups"]] == [SIZE] * 4
        assert all(server.parts for server in running.servers)

        for count, key in ((1, None), (3, "step 1")):
            whole = await post(running, count, TENSORS, key)
            assert whole.headers["content-type"] == TENSORS
            assert len(safetensors.numpy.load(whole.content)["offsets"]) == count * SIZE + 1
