"""What a key may have, and what it may see, on a server with several keys."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
ONE, OTHER, ADMIN = "one-5f1d", "other-77ab", "admin-e31b"
SHARE = 16
AT_ONCE = 24
PROMPT = "7a-5b*4>"
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
PATIENCE = 180.0


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shares")
    (folder / "use").write_text(f"{ONE}\n{OTHER}\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    flags = (
        *("--api-key-file", str(folder / "use"), "--admin-api-key-file", str(folder / "admin")),
        *("--max-candidates-per-key", str(SHARE), "--group-name-wait", "5"),
    )
    with serve(DARTS, folder / "log", *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:  # has /pause
        yield running


def call(server: Server, method: str, path: str, key: str = ONE, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(method, server.url + path, headers=headers, timeout=240, **more)


def completion(n: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": PROMPT, "n": n, **more}


def vote(n: int, **sampling: Any) -> tuple[str, dict[str, Any]]:
    return "/darts/v1/vote", {"prompt": PROMPT, "n": n, "pattern": "#([0-9])", "sampling": sampling}


def rollouts(prompts: int, size: int, **sampling: Any) -> tuple[str, dict[str, Any]]:
    return "/darts/v1/rollouts", {"prompts": [{"text": PROMPT}] * prompts, "group_size": size, "sampling": sampling}


@pytest.mark.parametrize(
    ("request_", "admitted"),
    [
        (vote(8, **LONG), 2),
        (rollouts(2, 4, **LONG), 1),
        (completion(8, **LONG), 1),
        (completion(8, stream=True, **LONG), 1),
        (completion(8, vllm_xargs={"darts_policy": "off"}, **LONG), 2),
        (completion(1, vllm_xargs={"darts_group_id": "g", "darts_group_size": 8}, **LONG), 16),
    ],
    ids=["vote", "rollouts", "shaped", "streamed", "unshaped", "joined"],
)
def test_requests_that_come_together_never_get_more_than_their_keys_share(
    server: Server, request_: tuple[str, dict[str, Any]], admitted: int
) -> None:
    """While the server is paused none ends, so that all are in flight at the same time."""
    path, body = request_
    assert call(server, "POST", "/pause?mode=wait", ADMIN).status_code == 200
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sent = [pool.submit(call, server, "POST", path, json=body) for _ in range(AT_ONCE)]
        deadline = time.monotonic() + PATIENCE
        while sum(each.done() for each in sent) < AT_ONCE - admitted and time.monotonic() < deadline:
            time.sleep(0.02)
        refused = [each.result().status_code for each in sent if each.done()]
        assert call(server, "POST", "/resume", ADMIN).status_code == 200
    assert refused == [429] * (AT_ONCE - admitted)
    assert sorted(each.result().status_code for each in sent) == [200] * admitted + refused
    assert call(server, "POST", path, json=body).status_code == 200


# --- what a key may see -----------------------------------------------------


def own_things(server: Server) -> dict[str, str]:
    """Let the first key make one of everything; the paths that show it."""
    path, body = completion(4, request_id="mine", max_tokens=10)
    made = call(server, "POST", path, json=body)
    path, body = vote(4, max_tokens=10)
    voted = call(server, "POST", path, json=body).json()
    path, body = rollouts(1, 4, max_tokens=10)
    batch = call(server, "POST", path, json=body, headers={"Idempotency-Key": "k"}).json()
    stream = call(server, "POST", path, json=body | {"stream": "groups"}, headers={"Idempotency-Key": "s"})
    streamed = json.loads(stream.text.split("data: ")[1].split("\n")[0])["id"]
    return {
        "a response's groups": f"/darts/v1/groups/{made.headers['X-Darts-Group-Id']}",
        "one group": "/darts/v1/groups/cmpl-mine-0",
        "a vote's group": f"/darts/v1/groups/{voted['id']}",
        "a batch's group": f"/darts/v1/groups/{batch['groups'][0]['group_id']}",
        "a batch": f"/darts/v1/rollouts/{batch['id']}",
        "a stream": f"/darts/v1/rollouts/{streamed}",
    }


def test_what_belongs_to_a_key_is_shown_to_it_and_to_admins_alone(server: Server) -> None:
    for what, path in own_things(server).items():
        statuses = [call(server, "GET", path, key).status_code for key in (ONE, OTHER, ADMIN)]
        assert statuses == [200, 404, 200], what


def test_the_list_of_groups_shows_a_key_its_own(server: Server) -> None:
    path, body = completion(4, request_id="listed", max_tokens=10)
    assert call(server, "POST", path, json=body).status_code == 200
    listed = {key: call(server, "GET", "/darts/v1/groups", key).json()["groups"] for key in (ONE, OTHER, ADMIN)}
    [newest] = [group for group in listed[ONE] if group["group_id"] == "cmpl-listed-0"]
    assert newest == listed[ONE][0] | {"ended_ago": newest["ended_ago"]}
    assert (newest["outcome"], newest["returned"]) == ("completed", 4)
    assert 0 <= newest["ended_ago"] < 600
    ids = {key: {group["group_id"] for group in groups} for key, groups in listed.items()}
    assert "cmpl-listed-0" in ids[ADMIN]
    assert not ids[OTHER] & ids[ONE]


def test_the_live_feed_shows_a_key_its_own_groups(server: Server) -> None:
    path, body = completion(4, request_id="seen", max_tokens=10)
    assert call(server, "POST", path, json=body).status_code == 200
    seen = {}
    for key in (ONE, OTHER, ADMIN):
        seen[key] = {group["group_id"] for group in call(server, "GET", "/darts/v1/live", key).json()["groups"]}
        headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
        with httpx.stream("GET", f"{server.url}/darts/v1/live", headers=headers) as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        streamed = {group["group_id"] for group in json.loads(first.removeprefix("data: "))["groups"]}
        assert streamed == seen[key]
    assert "cmpl-seen-0" in seen[ONE] & seen[ADMIN]
    assert not seen[OTHER] & seen[ONE]


def test_another_key_cannot_cancel_a_batch_and_has_idempotency_keys_of_its_own(server: Server) -> None:
    path, body = rollouts(1, 8, **LONG)
    authorization = {"Authorization": f"Bearer {ONE}", "Idempotency-Key": "both"}
    body["stream"] = "groups"
    with httpx.stream("POST", server.url + path, headers=authorization, json=body, timeout=240) as stream:
        lines = stream.iter_lines()
        batch_id = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["id"]
        assert call(server, "DELETE", f"/darts/v1/rollouts/{batch_id}", OTHER).status_code == 404
        assert [line for line in lines if line.startswith("event: ")][-1] == "event: done"
    other = call(server, "POST", path, OTHER, json=body, headers={"Idempotency-Key": "both"})
    assert other.status_code == 200
    assert batch_id not in other.text
    ended = {"id": batch_id, "cancelled": False}
    assert call(server, "DELETE", f"/darts/v1/rollouts/{batch_id}", ADMIN).json() == ended


def test_two_keys_may_use_the_same_request_id_and_each_rewards_its_own_trajectories(server: Server) -> None:
    """As two trainers do that number their steps."""
    answers = {}
    for n, key in ((2, ONE), (3, OTHER)):
        path, body = completion(n, max_tokens=10)
        answers[key] = call(server, "POST", path, key, json=body, headers={"X-Request-Id": "step-7"})
    [name] = {answer.headers["X-Darts-Group-Id"] for answer in answers.values()}

    def report(key: str, reward: float) -> dict[str, int]:
        [group] = call(server, "GET", f"/darts/v1/groups/{name}", key).json()["groups"]
        selected = [each["trajectory_id"] for each in group["candidates"] if each["selected_as"]]
        rewards = [{"trajectory_id": each, "reward": reward} for each in selected]
        answer: dict[str, int] = call(server, "POST", "/darts/v1/rewards", key, json={"rewards": rewards}).json()
        return answer

    def rewards_of(key: str) -> set[float | None]:
        [group] = call(server, "GET", f"/darts/v1/groups/{name}", key).json()["groups"]
        return {each["reward"] for each in group["candidates"] if each["selected_as"]}

    assert report(ONE, 1.0)["matched"] == 2
    assert (rewards_of(ONE), rewards_of(OTHER)) == ({1.0}, {None})
    assert report(OTHER, 0.0)["matched"] == 3
    assert (rewards_of(ONE), rewards_of(OTHER)) == ({1.0}, {0.0})


def test_sessions_belong_to_a_key_and_each_session_has_a_key_of_its_own(server: Server) -> None:
    made = call(server, "POST", "/darts/v1/sessions", json={"size": 2, "extra": 0, "policy": "off"}).json()
    first, second = made["sessions"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
    turn = f"/darts/v1/sessions/{first['id']}/v1/completions"
    group = f"/darts/v1/session-groups/{made['group_id']}"
    for method, path in (
        ("POST", turn),
        ("GET", f"/darts/v1/sessions/{first['id']}"),
        ("POST", f"/darts/v1/sessions/{first['id']}:end"),
        ("GET", f"/darts/v1/sessions/{first['id']}/events?wait=0"),
        ("GET", group),
        ("GET", f"{group}/events?wait=0"),
        ("DELETE", group),
    ):
        sent = {"json": body} if path == turn else {}
        assert call(server, method, path, OTHER, **sent).status_code == 404, path
        assert call(server, method, path, "no key", **sent).status_code == 401, path
    # A sandbox has the session's key alone.
    assert call(server, "POST", turn, first["api_key"], json=body).status_code == 200
    assert call(server, "POST", "/v1/completions", first["api_key"], json=body).json()["darts_session"]["turns"] == 2
    assert call(server, "POST", turn, second["api_key"], json=body).status_code == 403
    assert call(server, "POST", "/darts/v1/sessions", first["api_key"], json={}).status_code == 403
    assert call(server, "POST", "/pause", first["api_key"]).status_code == 403
    # The id of another key's session in a header is refused, as are two ids that differ.
    for key, path, named, status in (
        (OTHER, "/v1/completions", first, 404),
        (ONE, turn, second, 409),
        (first["api_key"], "/v1/completions", second, 409),
        (ONE, "/v1/completions", {"id": "ses-" + "0" * 24}, 404),
    ):
        lie = call(server, "POST", path, key, json=body, headers={"X-Session-ID": named["id"]})
        assert lie.status_code == status, lie.text
    assert call(server, "POST", f"/darts/v1/sessions/{first['id']}:end", json={"reward": 1}).status_code == 200
    assert call(server, "DELETE", group, ADMIN).json()["state"] == "cancelled"
