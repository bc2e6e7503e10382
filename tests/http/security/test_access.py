import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.http.security.access import Access, Keys, check_listening
from darts_server.http.security.sites import is_loopback
from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")

CHANGES = [("PUT", "state"), ("PATCH", "policy")]
READS = ["state", "policy", "prompts/p"]
BODIES = {"state": b"", "policy": b"{}"}
PASSED = {"state": 400, "policy": 200}  # an empty file is damaged
OTHER_MACHINE = "192.168.1.7"


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_may_change_the_server(method: str, path: str, host: str) -> None:
    with client(host=host) as caller:
        assert caller.request(method, f"/darts/v1/{path}", content=BODIES[path]).status_code == PASSED[path]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("host", [OTHER_MACHINE, "2001:db8::1", "::ffff:10.0.0.1", "testclient", "", None])
def test_without_keys_other_machines_may_not_and_the_error_names_the_remedy(
    method: str, path: str, host: str | None
) -> None:
    with client(host=host) as caller:
        answer = caller.request(method, f"/darts/v1/{path}", content=BODIES[path])
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["type"] == "PermissionDeniedError"
    assert f"{method} /darts/v1/{path}" in error["message"]
    assert "--admin-api-key-file" in error["message"]


@pytest.mark.parametrize("path", READS)
def test_without_keys_everyone_may_read(path: str) -> None:
    with client(host=OTHER_MACHINE) as caller:
        assert caller.get(f"/darts/v1/{path}").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_MACHINE])
@pytest.mark.parametrize(("method", "path"), [*CHANGES, *(("GET", path) for path in READS)])
def test_with_keys_every_route_needs_one_from_every_host(method: str, path: str, host: str) -> None:
    with client("one", "two", host=host) as caller:
        for key in (None, "three", ""):
            answer = caller.request(method, f"/darts/v1/{path}", headers=bearer(key))
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_with_keys_but_no_admin_key_only_this_machine_may_change_the_server(method: str, path: str) -> None:
    for host, status in (("127.0.0.1", PASSED[path]), (OTHER_MACHINE, 403)):
        with client("one", host=host) as caller:
            answer = caller.request(method, f"/darts/v1/{path}", headers=bearer("one"), content=BODIES[path])
            assert answer.status_code == status


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("host", ["127.0.0.1", OTHER_MACHINE])
@pytest.mark.parametrize("keys", [(), ("one",)])
def test_an_admin_key_is_needed_to_change_the_server_and_gives_access_to_all_routes(
    method: str, path: str, host: str, keys: tuple[str, ...]
) -> None:
    with client(*keys, admin_keys=["root"], host=host) as caller:

        def status(key: str | None) -> int:
            return caller.request(method, f"/darts/v1/{path}", headers=bearer(key), content=BODIES[path]).status_code

        assert status(None) == 401
        assert status("one") == 403
        assert status("root") == PASSED[path]
        assert caller.get("/darts/v1/policy", headers=bearer("root")).status_code == 200
        assert caller.get("/darts/v1/policy").status_code == (401 if keys else 200)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_without_keys_the_server_may_listen_on_loopback(host: str) -> None:
    check_listening(host, Access(), allow_unauthenticated=False)
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "some-name", "localhost.example.com"])
def test_other_addresses_need_a_key_or_permission(host: str) -> None:
    with pytest.raises(InvalidSetting, match=f"--host {host} .* VLLM_API_KEY .*--allow-unauthenticated") as error:
        check_listening(host, Access(admin_keys=Keys(["root"])), allow_unauthenticated=False)
    assert "\n" not in str(error.value)
    check_listening(host, Access(Keys(["one"])), allow_unauthenticated=False)
    check_listening(host, Access(), allow_unauthenticated=True)
