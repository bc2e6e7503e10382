"""Decide which host names stand for this server, and whose web pages may send it requests."""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from darts_server.exceptions import Forbidden

LOCAL_NAME = "localhost"
ANY = "*"
WILDCARD = "*."
"""Prefix of a pattern for all names below a domain."""
LONGEST_SHOWN = 100
"""Characters of a header in a message."""


class Sites:
    """Check the headers that browsers set: ``Host``, which names the server, and ``Origin``, which names the web page.

    A browser sends requests for every page that it shows, and these come from its own machine. A page is read by the
    page's own site alone, but a name that its owner lets point at this server (DNS rebinding) makes the server that
    site. So a server has to know its names. Addresses need no check: no DNS record changes what they point at.

    Args:
        hosts: names of this server, in addition to ``localhost`` and the machine's own: exact ones, ``*.example.com``
            for all below a domain, or ``*`` for every name.
        origins: of web pages, such as ``https://example.com``, or ``*``, in addition to the server's own and those of
            the machine that the browser runs on.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        self._hosts = {LOCAL_NAME, machine, machine.partition(".")[0], *(host.lower() for host in hosts)}
        self._domains = tuple(host.removeprefix(ANY) for host in self._hosts if host.startswith(WILDCARD))
        self._origins = set(origins)

    def check(self, host: str | None, origin: str | None) -> None:
        """Check a request. Without these headers it was not sent by a browser.

        Raises:
            Forbidden
        """
        if host is not None and not self._is_own(host):
            raise Forbidden(
                f"without an API key this server does not answer to the name {host[:LONGEST_SHOWN]!r}; use its IP "
                "address, or start it with --allowed-hosts NAME"
            )
        if origin is not None and not self._may_call(origin, host):
            raise Forbidden(
                f"without an API key web pages of {origin[:LONGEST_SHOWN]!r} may not call this server; to allow it, "
                "start the server with --allowed-origins '[\"ORIGIN\"]'"
            )

    def _is_own(self, host: str) -> bool:
        name = hostname(f"//{host}")
        return ANY in self._hosts or name in self._hosts or name.endswith(self._domains) or _is_address(name)

    def _may_call(self, origin: str, host: str | None) -> bool:
        if ANY in self._origins or origin in self._origins or is_loopback(hostname(origin)):
            return True
        return host is not None and origin.partition("://")[2].lower() == host.lower()


def hostname(url: str) -> str:
    """Return the host of a URL in lower case, without port; empty if it has none or an invalid port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError
        return parts.hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether an address or name stands for this machine."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == LOCAL_NAME
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
