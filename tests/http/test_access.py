import pytest

from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")

CHANGES = [("PUT", "state"), ("PATCH", "policy")]
READS = ["state", "policy", "groups/cmpl-a", "prompts/p"]
BODIES = {"state": b"", "policy": b"{}"}
PASSED = {"state": 400, "policy": 200}  # an empty file is damaged


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_without_a_key_this_machine_may_change_the_server(method: str, path: str, host: str) -> None:
    with client(host=host) as caller:
        assert caller.request(method, f"/darts/v1/{path}", content=BODIES[path]).status_code == PASSED[path]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("host", ["192.168.1.7", "2001:db8::1", "::ffff:10.0.0.1", "testclient", "", None])
def test_without_a_key_nobody_else_may_and_is_told_the_remedy(method: str, path: str, host: str | None) -> None:
    with client(host=host) as caller:
        answer = caller.request(method, f"/darts/v1/{path}", content=BODIES[path])
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["type"] == "PermissionDeniedError"
    assert f"{method} /darts/v1/{path}" in error["message"]
    assert "--api-key" in error["message"]


@pytest.mark.parametrize("origin", ["https://example.com", "null", "http://127.0.0.1.example.com", "http://[", ""])
def test_without_a_key_another_hosts_web_page_may_not_change_the_server(origin: str) -> None:
    with client() as caller:
        assert caller.patch("/darts/v1/policy", json={}, headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost:3000", "http://[::1]:8000"])
def test_this_machines_web_page_may(origin: str) -> None:
    with client() as caller:
        assert caller.patch("/darts/v1/policy", json={}, headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("path", READS)
def test_without_a_key_everyone_may_read(path: str) -> None:
    with client(host="192.168.1.7") as caller:
        assert caller.get(f"/darts/v1/{path}").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7"])
@pytest.mark.parametrize(("method", "path"), [*CHANGES, *(("GET", path) for path in READS)])
def test_with_keys_every_route_asks_for_one_from_everywhere(method: str, path: str, host: str) -> None:
    with client("one", "two", host=host) as caller:
        for header in ({}, {"Authorization": "Bearer three"}):
            assert caller.request(method, f"/darts/v1/{path}", headers=header).status_code == 401
        answer = caller.request(
            method, f"/darts/v1/{path}", headers={"Authorization": "Bearer two"}, content=BODIES.get(path)
        )
    assert answer.status_code == (200 if method == "GET" else PASSED[path])
