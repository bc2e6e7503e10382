import socket
from typing import Any

import pytest

from darts_server.exceptions import Forbidden, InvalidSetting, Unauthorized
from darts_server.http.security.access import Access, Keys, RouteAccess, Sender, Sites, check_listening, is_loopback

HERE = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")
ELSEWHERE = ("192.168.1.7", "2001:db8::1", "::ffff:10.0.0.1", "testclient", "")
OK = None
NO_KEY = Unauthorized
CLOSED = Forbidden
Given = tuple[list[str], list[str]]
"""Keys, and admin keys."""
NONE: Given = ([], [])
ONE: Given = (["one"], [])
ROOT: Given = ([], ["root"])
BOTH: Given = (["one"], ["root"])


@pytest.mark.parametrize(
    ("keys", "sent", "use", "change_here", "change_elsewhere"),
    [
        (NONE, None, OK, OK, CLOSED),
        (NONE, b"three", OK, OK, CLOSED),
        (ONE, None, NO_KEY, NO_KEY, NO_KEY),
        (ONE, b"three", NO_KEY, NO_KEY, NO_KEY),
        (ONE, b"one", OK, OK, CLOSED),
        (ROOT, None, OK, NO_KEY, NO_KEY),
        (ROOT, b"one", OK, CLOSED, CLOSED),
        (ROOT, b"root", OK, OK, OK),
        (BOTH, None, NO_KEY, NO_KEY, NO_KEY),
        (BOTH, b"one", OK, CLOSED, CLOSED),
        (BOTH, b"root", OK, OK, OK),
    ],
)
def test_keys_decide_the_access_or_the_address_without_admin_keys(
    keys: Given, sent: bytes | None, use: Any, change_here: Any, change_elsewhere: Any
) -> None:
    access = Access(Keys(keys[0]), Keys(keys[1]), allow_dangerous=True)

    def refused(kind: RouteAccess, address: str) -> type[Exception] | None:
        try:
            access.identify_caller(kind, "PUT /x", sent, Sender(address))
        except (Unauthorized, Forbidden) as error:
            return type(error)
        return None

    for address in (*HERE, *ELSEWHERE):
        change = change_here if address in HERE else change_elsewhere
        assert refused(RouteAccess.PUBLIC, address) is None
        assert refused(RouteAccess.USE, address) is use
        assert refused(RouteAccess.ADMIN, address) is refused(RouteAccess.DANGEROUS, address) is change


def test_dangerous_routes_are_closed_to_admins_too_unless_they_are_enabled() -> None:
    with pytest.raises(Forbidden, match="--allow-dangerous-routes"):
        Access(admin_keys=Keys(["root"])).identify_caller(RouteAccess.DANGEROUS, "PUT /x", b"root", Sender(HERE[0]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "some-name", "localhost.example.com"])
def test_other_addresses_need_a_key_or_permission(host: str) -> None:
    with pytest.raises(InvalidSetting, match=f"--host {host} .* VLLM_API_KEY .*--allow-unauthenticated") as error:
        check_listening(host, Access(admin_keys=Keys(["root"])), allow_unauthenticated=False)
    assert "\n" not in str(error.value)
    check_listening(host, Access(Keys(["one"])), allow_unauthenticated=False)
    check_listening(host, Access(), allow_unauthenticated=True)
    for loopback in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_listening(loopback, Access(), allow_unauthenticated=False)
        assert is_loopback(loopback)


# --- sites

OWN = "127.0.0.1:8000"
STRANGE = "https://example.com"
SITES = Sites(["Rollouts.example.com", "*.cluster.local", "node17"], ["https://app.example.com"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "0.0.0.0:8000"),
        *("10.1.2.3", "10.1.2.3:8000", "203.0.113.9:80", "[2001:db8::1]", "[fe80::1%25eth0]:8000"),
        *("rollouts.example.com", "ROLLOUTS.example.com:443", "a.cluster.local", "a.b.cluster.local:8000", "node17:1"),
        socket.gethostname(),
        None,
    ],
)
def test_addresses_and_own_names_pass(host: str | None) -> None:
    SITES.check(host, None)


@pytest.mark.parametrize(
    "host",
    [
        *("example.com", "example.com:8000", "localhost.example.com", "127.0.0.1.example.com", "127.1", "0x7f000001"),
        *("cluster.local", "xcluster.local", "a.cluster.local.example.com", "rollouts", "rollouts.example.com.", ""),
        *("[", "[::1", "a b", "*", "localhost:8000:8000.example.com"),
    ],
)
def test_other_names_are_refused_and_the_error_names_the_remedy(host: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-hosts"):
        SITES.check(host, None)


def test_the_machine_has_a_short_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node7.cluster.example")
    sites = Sites()
    sites.check("node7.cluster.example:8000", None)
    sites.check("node7:8000", None)
    for host in ("node7.example", "cluster.example", "other.cluster.example"):
        with pytest.raises(Forbidden):
            sites.check(host, None)


def test_a_star_in_hosts_allows_every_name_and_a_star_in_origins_every_web_page() -> None:
    sites = Sites(["*"])
    sites.check("example.com", None)
    sites.check("example.com", "https://example.com")
    with pytest.raises(Forbidden):
        sites.check("example.com", "https://other.example.com")
    Sites(origins=["*"]).check(OWN, STRANGE)
    with pytest.raises(Forbidden) as error:
        Sites().check("x" * 10_000, None)
    assert len(str(error.value)) < 400, "a long header is cut"


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8000", OWN),
        ("http://localhost:3000", OWN),
        ("http://[::1]:3000", OWN),
        ("http://10.1.2.3:8000", "10.1.2.3:8000"),
        ("https://rollouts.example.com", "Rollouts.example.com"),
        ("https://app.example.com", OWN),
    ],
)
def test_pages_of_the_server_of_this_machine_and_of_allowed_origins_may_call(origin: str, host: str) -> None:
    SITES.check(host, origin)


@pytest.mark.parametrize(
    "origin",
    [
        *(STRANGE, "null", "", "http://[", "http://127.0.0.1.example.com", "https://app.example.com:444"),
        *("http://10.1.2.3:8000", "http://rollouts.example.com", "http://app.example.com", "file://"),
    ],
)
def test_pages_of_strangers_may_not_call_and_the_error_names_the_remedy(origin: str) -> None:
    for host in (OWN, None):
        with pytest.raises(Forbidden, match="--allowed-origins"):
            SITES.check(host, origin)
