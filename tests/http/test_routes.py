from collections.abc import Iterator
from threading import get_ident

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.testclient import TestClient

from darts_server.http.routes import serve_metrics_in_the_loop
from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")


@pytest.fixture(scope="module")
def opened() -> Iterator[TestClient]:
    with client() as opened:
        yield opened


def test_provenance_tells_every_candidates_length_fate_and_rank(opened: TestClient) -> None:
    [group] = opened.get("/darts/v1/groups/cmpl-a-0").json()["groups"]
    assert (group["group_size"], group["outcome"], group["generated"], group["returned"]) == (2, "completed", 60, 30)
    assert [(c["length"], c["selected_as"], c["reason"], c["rank"]) for c in group["candidates"]] == [
        (10, "short", None, 0),
        (20, "short", None, 1),
        (30, None, "longer_than_needed", None),
    ]
    assert group["candidates"][0]["weight_version_start"] == 3


def test_a_responses_id_gives_all_its_groups(opened: TestClient) -> None:
    groups = opened.get("/darts/v1/groups/cmpl-a").json()["groups"]
    assert [g["group_id"] for g in groups] == ["cmpl-a-0", "cmpl-a-1"]


def test_a_prompts_statistics_are_found_by_the_key_that_its_groups_tell(opened: TestClient) -> None:
    key = opened.get("/darts/v1/groups/cmpl-a-0").json()["groups"][0]["prompt_key"]
    stats = opened.get(f"/darts/v1/prompts/{key}").json()
    assert (stats["mean_ema"], stats["std_ema"], stats["groups"], stats["candidates"]) == (20, 10, 2, 6)


@pytest.mark.parametrize("path", ["prompts/gsm8k%2F7", "prompts/gsm8k/7"])
def test_a_callers_own_prompt_key_may_have_slashes(opened: TestClient, path: str) -> None:
    assert opened.get(f"/darts/v1/{path}").json()["prompt_key"] == "gsm8k/7"


@pytest.mark.parametrize("path", ["groups/none", "prompts/none", "prompts/none/of/them"])
def test_what_is_not_there_is_not_found_in_openais_form(opened: TestClient, path: str) -> None:
    answer = opened.get(f"/darts/v1/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert answer.json()["error"]["param"] in ("group_id", "prompt_key")


def test_gauges_are_read_where_the_event_loop_changes_what_they_show() -> None:
    registry = CollectorRegistry()
    threads: list[int] = []

    def read() -> float:
        threads.append(get_ident())
        return 1.0

    Gauge("shown", "What the loop changes.", registry=registry).set_function(read)
    application = FastAPI()
    Instrumentator(registry=registry).expose(application)
    serve_metrics_in_the_loop(application)

    @application.get("/loop")
    async def loop() -> int:
        return get_ident()

    with TestClient(application) as client:
        assert "shown 1.0" in client.get("/metrics").text
        assert threads == [client.get("/loop").json()]
