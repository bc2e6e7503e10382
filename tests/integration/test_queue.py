"""The queue on real vLLM."""

import json
import signal
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from darts_server.demo.server import DARTS, Server, serving
from tests.integration import waiting
from tests.integration.consumers import Consumers

pytestmark = pytest.mark.engine
PROMPT = "7a-5b*4>"
SHORT = {"max_tokens": 12, "logprobs": True}
PATIENCE = 120.0


def put(server: Server, job: str, count: int, /, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    prompts = [{"text": PROMPT, "id": f"p{number}", "metadata": {"number": number}} for number in range(count)]
    body = {"job": job, "prompts": prompts, "group_size": 4, "sampling": SHORT} | more
    return httpx.post(f"{server.url}/darts/v1/queue", json=body, headers=headers, timeout=240)


def take_now(server: Server, job: str, count: int, wait: float = 0) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"job": job, "count": count, "wait": wait}
    answer = httpx.get(f"{server.url}/darts/v1/queue/groups", params=params, timeout=240)
    assert answer.status_code == 200, answer.text
    groups: list[dict[str, Any]] = answer.json()["groups"]
    return groups


def take(server: Server, job: str, count: int) -> list[dict[str, Any]]:
    """Take as many groups, however slow the machine is."""
    groups: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE
    while len(groups) < count and time.monotonic() < deadline:
        groups += take_now(server, job, count - len(groups), wait=20)
    return groups


def acknowledge(server: Server, *groups: dict[str, Any]) -> list[str]:
    leases = [group["lease"] for group in groups]
    answer = httpx.post(f"{server.url}/darts/v1/queue/ack", json={"leases": leases}, timeout=240)
    assert answer.status_code == 200, answer.text
    return [lease["outcome"] for lease in answer.json()["leases"]]


def status(server: Server, job: str) -> dict[str, Any]:
    jobs = httpx.get(f"{server.url}/darts/v1/queue").json()["jobs"]
    return next(each for each in jobs if each["job"] == job)


@pytest.fixture
def job() -> str:
    return f"job/{uuid4().hex}"


def test_prompts_go_in_and_groups_come_out_once(server: Server, job: str) -> None:
    answer = put(server, job, 5)
    assert answer.json() == {"job": job, "ids": ["p0", "p1", "p2", "p3", "p4"], "added": 5}
    groups = take(server, job, 5)
    assert sorted(group["id"] for group in groups) == ["p0", "p1", "p2", "p3", "p4"]
    for group in groups:
        assert (group["staleness"], group["group"]["error"]) == (0, None)
        assert group["group"]["metadata"] == {"number": int(group["id"][1:])}
        assert [len(each["logprobs"]) == each["length"] for each in group["group"]["trajectories"]] == [True] * 4
    assert take_now(server, job, 1) == []
    assert status(server, job)["leased"] == 5
    assert acknowledge(server, *groups) == ["acknowledged"] * 5
    assert acknowledge(server, *groups, {"lease": "99-x"}) == ["already"] * 5 + ["unknown"]
    assert put(server, job, 5).json()["added"] == 0, "their ids are known"
    deleted = httpx.delete(f"{server.url}/darts/v1/queue/jobs/{job}")
    assert deleted.json() == {"job": job, "dropped": 0}


def test_a_bad_prompt_fails_alone(server: Server, job: str) -> None:
    prompts = [{"text": PROMPT}, {"token_ids": [10**6]}, {"text": PROMPT}]
    assert put(server, job, 0, prompts=prompts).status_code == 200
    groups = take(server, job, 3)
    assert [group["group"]["error"] is None for group in groups] == [False, True, True]
    assert groups[0]["group"]["error"]["param"] == "prompt.token_ids"
    acknowledge(server, *groups)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"group_size": 0}, "group_size"),
        ({"prompts": [{"text": PROMPT}, {}]}, "prompts[1]"),
        ({"sampling": {"max_tokens": "many"}}, "sampling.max_tokens"),
        ({"policy": {"name": "none"}}, "policy"),
        ({"weight": 0}, "weight"),
        ({"groups_per_version": 0}, "groups_per_version"),
        ({"expires_after": 60}, "expires_after"),
        ({"taken": -1}, "taken"),
        ({"job": ""}, "job"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_bad_input_names_the_field_and_adds_nothing(server: Server, job: str, body: dict[str, Any], field: str) -> None:
    answer = put(server, job, 1, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not any(each["job"] == job for each in httpx.get(f"{server.url}/darts/v1/queue").json()["jobs"])


@pytest.mark.parametrize(
    "query", ["count=0", "count=5000", "wait=-1", "wait=nan", "wait=61", "job=", "lease_seconds=0"]
)
def test_a_bad_query_is_refused(server: Server, query: str) -> None:
    assert httpx.get(f"{server.url}/darts/v1/queue/groups?{query}").status_code == 400


def test_web_pages_of_other_sites_take_nothing(server: Server, job: str) -> None:
    answer = httpx.get(f"{server.url}/darts/v1/queue/groups?job={job}", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403


def test_the_same_key_and_another_body_is_a_conflict(server: Server, job: str) -> None:
    headers = {"Idempotency-Key": uuid4().hex}
    assert put(server, job, 2, headers=headers).json()["added"] == 2
    assert put(server, job, 2, headers=headers).json() == {"job": job, "ids": ["p0", "p1"], "added": 0}
    assert put(server, job, 3, headers=headers).status_code == 409
    httpx.delete(f"{server.url}/darts/v1/queue/jobs/{job}")


def test_a_stream_goes_on_as_groups_are_acknowledged_and_a_stalled_one_costs_nobody_else_anything(
    server: Server, job: str
) -> None:
    put(server, job, 6)
    headers = {"Accept": "text/event-stream"}
    stalled: dict[str, Any] = {"job": job, "count": 1, "lease_seconds": 600}
    with httpx.stream("GET", f"{server.url}/darts/v1/queue/groups", params=stalled, headers=headers, timeout=240):
        deadline = time.monotonic() + PATIENCE
        while status(server, job)["leased"] < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        params: dict[str, Any] = {"job": job, "count": 2}
        ids = []
        with httpx.stream(
            "GET", f"{server.url}/darts/v1/queue/groups", params=params, headers=headers, timeout=240
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    group = json.loads(line.removeprefix("data:"))
                    ids.append(group["id"])
                    assert acknowledge(server, group) == ["acknowledged"]
                if len(ids) == 5:
                    break
        assert len(set(ids)) == 5
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.delete(f"{server.url}/darts/v1/queue/jobs/{job}").json()["dropped"] == 1


def test_a_take_that_is_sent_again_with_its_key_gets_the_same_groups(server: Server, job: str) -> None:
    put(server, job, 2, expires_after=3600)
    assert (status(server, job)["expires_after"], status(server, job)["owner"]) == (3600, None)
    params: dict[str, Any] = {"job": job, "wait": 30}
    keys = [{"Idempotency-Key": name} for name in ("one", "one", "two")]
    url = f"{server.url}/darts/v1/queue/groups"
    answers = [httpx.get(url, params=params, headers=key, timeout=240) for key in keys]
    assert answers[0].json() == answers[1].json() != answers[2].json()
    assert httpx.get(url, params=params, headers={"Idempotency-Key": "a" * 300}).status_code == 400
    acknowledge(server, *answers[0].json()["groups"], *answers[2].json()["groups"])
    assert httpx.delete(f"{server.url}/darts/v1/queue/jobs/{job}?owner=x").status_code in (403, 404)
    httpx.delete(f"{server.url}/darts/v1/queue/jobs/{job}")


@pytest.mark.nightly
def test_a_server_that_is_killed_loses_nothing_and_hands_nothing_out_twice(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--queue-lease-seconds", "3600")
    done: list[str] = []
    held: list[dict[str, Any]] = []
    with serving(DARTS, tmp_path / "log", *flags) as server:
        assert httpx.get(f"{server.url}/darts/v1/queue").json()["durable"]
        put(server, "job", 40)
        held = take(server, "job", 10)
        done += [group["id"] for group in held[:5]]
        assert acknowledge(server, *held[:5]) == ["acknowledged"] * 5
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(30)
    with serving(DARTS, tmp_path / "log2", *flags) as server:
        assert acknowledge(server, *held) == ["already"] * 5 + ["acknowledged"] * 5
        done += [group["id"] for group in held[5:]]
        assert put(server, "job", 40).json()["added"] == 0
        while groups := take_now(server, "job", 8, wait=30):
            assert acknowledge(server, *groups) == ["acknowledged"] * len(groups)
            done += [group["id"] for group in groups]
    assert sorted(done) == sorted(f"p{number}" for number in range(40))


LIVES = 6


def check_counters(server: Server, consumers: Consumers, put_so_far: int, added: int) -> None:
    """Check that what the server has counted since its start is what its consumers got."""
    expected = {"put": added, "handed_out": consumers.leases, "acknowledged": consumers.acknowledged}
    for event, count in expected.items():
        waiting.wait_counted(server, "darts_queue_events_total", count, event=event)
        assert server.metric("darts_queue_events_total", event=event) == count, event
    now = status(server, "job")
    left = sum(now[state] for state in ("queued", "running", "ready", "leased"))
    assert left == put_so_far - len(consumers.done)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # six servers that nobody has forked
def test_each_group_is_acknowledged_once_although_servers_are_killed_and_consumers_die(tmp_path: Path) -> None:
    """Six consumers with leases of a second, some of which die or are late, and five servers that are killed."""
    part = 60
    size = LIVES * part
    flags = ("--state-dir", str(tmp_path / "state"))
    names = [f"p{number}" for number in range(size)]
    sampling = SHORT | {"max_tokens": 60, "ignore_eos": True}
    expired = 0.0
    with Consumers("job", 6) as consumers:
        for life in range(LIVES):
            with serving(DARTS, tmp_path / f"log{life}", *flags) as server:
                known, total = life * part, (life + 1) * part
                added = put(server, "job", total, sampling=sampling).json()["added"]
                assert added == total - known, "what was put before is known, also what was acknowledged"
                consumers.connect(server)
                is_last = total == size
                consumers.wait_done(size if is_last else known + part // 2)
                with consumers.paused():
                    check_counters(server, consumers, total, added)
                    if is_last:
                        consumers.disconnect()  # a stopping server hands nothing out
                expired += server.metric("darts_queue_events_total", event="expired")
                if not is_last:
                    consumers.wait_done(known + part * 2 // 3)
                    server.process.send_signal(signal.SIGKILL)
                    server.process.wait(30)
                    consumers.disconnect()
    assert not consumers.errors
    assert sorted(consumers.done) == sorted(names)
    assert consumers.deaths > 10
    assert expired > 10
