import socket

import pytest

from darts_server.exceptions import Forbidden
from darts_server.http.security.sites import Sites

OWN, STRANGE = "127.0.0.1:8000", "https://example.com"
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


def test_a_star_stands_for_every_name_but_not_for_every_web_page() -> None:
    sites = Sites(["*"])
    sites.check("example.com", None)
    sites.check("example.com", "https://example.com")
    with pytest.raises(Forbidden):
        sites.check("example.com", "https://other.example.com")


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


def test_every_origin_can_be_allowed() -> None:
    Sites(origins=["*"]).check(OWN, STRANGE)


def test_a_long_header_is_cut_in_the_message() -> None:
    with pytest.raises(Forbidden) as error:
        Sites().check("x" * 10_000, None)
    assert len(str(error.value)) < 400
