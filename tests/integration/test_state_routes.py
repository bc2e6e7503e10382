"""Save and restore learned state while the server runs."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server
from darts_server.rollout.learned.statistics import LATENCY
from darts_server.store.archive import LIMIT_BYTES, Row, pack, unpack

pytestmark = pytest.mark.engine
BODY = {"model": "tiny", "prompt": "2a+3b-1c>", "n": 2, "max_tokens": 100}


@pytest.fixture
def api(server: Server) -> Iterator[httpx.Client]:
    """A client of the server, whose state is restored afterwards."""
    with httpx.Client(base_url=server.url, timeout=240) as client:
        state = client.get("/darts/v1/state").content
        yield client
        client.put("/darts/v1/state", content=state).raise_for_status()


def groups(api: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the groups of one request; none if it was not shaped."""
    answer = api.post("/v1/completions", json=BODY | body)
    assert len(answer.json()["choices"]) == (BODY | body)["n"]
    name = answer.headers.get("X-Darts-Group-Id")
    found: list[dict[str, Any]] = [] if name is None else api.get(f"/darts/v1/groups/{name}").json()["groups"]
    return found


def learned_rows(state: bytes) -> list[Row]:
    """Return the rows of a state but the engine's latency: a step of stopped candidates may be observed afterwards."""
    return [row for row in unpack(state, LIMIT_BYTES) if row[0] != LATENCY.name]


def test_a_restored_state_equals_the_saved_one(api: httpx.Client) -> None:
    [group] = groups(api, n=8)
    url = f"/darts/v1/prompts/{group['prompt_key']}"
    learned = api.get(url).json()
    saved = api.get("/darts/v1/state").content

    groups(api, n=8)
    assert api.get(url).json()["groups"] == learned["groups"] + 1
    restored = api.put("/darts/v1/state", content=saved)
    assert restored.status_code == 200
    assert restored.json()["prompts"] >= 1
    assert api.get(url).json() == learned
    assert learned_rows(api.get("/darts/v1/state").content) == learned_rows(saved)


def test_a_state_with_a_number_that_cannot_be_used_is_refused(api: httpx.Client, server: Server) -> None:
    [group] = groups(api, n=8)
    document = {"std_ema": 10**400, "mean_ema": 9.0, "groups": 1, "candidates": 8, "weight_version": 0}
    before = learned_rows(api.get("/darts/v1/state").content)
    refused = api.put("/darts/v1/state", content=pack([("prompt", group["prompt_key"], json.dumps(document))]))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "body")
    assert f"prompt {group['prompt_key']!r}: std_ema must be" in refused.json()["error"]["message"]
    assert learned_rows(api.get("/darts/v1/state").content) == before
    assert len(groups(api, n=8)) == 1
    assert server.metric("darts_observer_failures_total") == 0
