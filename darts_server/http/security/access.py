"""Decide who may call which route: by API key, or by address for callers on this machine.

Also which host names stand for this server, and whose web pages may send it requests without a key.
"""

import hashlib
import logging
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from darts_server.caller import Caller
from darts_server.exceptions import Forbidden, InvalidSetting, Unauthorized
from darts_server.files import read_file

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 1024 * 1024
"""Enough for ten thousand keys."""
SEND_A_KEY = "send the header Authorization: Bearer KEY, with a key of this server"
LOCAL_NAME = "localhost"
ANY = "*"
LONGEST_SHOWN = 100
"""Characters of a header in a message."""


class RouteAccess(Enum):
    """Who may call a route."""

    PUBLIC = "public"
    """Everyone."""
    USE = "use"
    """Callers with a key; everyone if there are no keys."""
    ADMIN = "admin"
    """It changes the server. Callers with an admin key; if there are none, callers on this machine."""
    DANGEROUS = "dangerous"
    """It runs code or writes files that the caller chooses, or bypasses weight updates. Off by default; if enabled, as
    `ADMIN`."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a request comes from.

    ``address``: of the caller; empty if unknown, as on a Unix socket. ``host``, ``origin``: the headers of these names.
    ``is_forwarded``: whether a proxy has sent it, so that the address is the proxy's, or one that anyone can claim.
    """

    address: str
    host: str | None = None
    origin: str | None = None
    is_forwarded: bool = False

    @property
    def is_here(self) -> bool:
        """Whether a program on this machine, or a web page of this machine, has sent the request."""
        is_page_of_others = self.origin is not None and not is_loopback(hostname(self.origin))
        return is_loopback(self.address) and not self.is_forwarded and not is_page_of_others


class Keys:
    """API keys: those given at start, and those in a file, one per line. Lines that begin with ``#`` are comments."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        """
        Raises:
            InvalidSetting: the file cannot be read, or has no key.
        """
        self.file = file
        self._fixed = [_digest(key.encode()) for key in keys]
        self._digests = self._read()

    def _read(self) -> list[bytes]:
        keys = []
        if self.file is not None:
            try:
                lines = [line.strip() for line in read_file(self.file, MAX_KEY_FILE_BYTES).splitlines()]
            except OSError as error:
                raise InvalidSetting(f"key file {self.file} cannot be read: {error.strerror}") from error
            if not (keys := [line for line in lines if line and not line.startswith(b"#")]):
                rule = "must have keys, one per line; lines that begin with # are comments"
                raise InvalidSetting(f"key file {self.file} {rule}")
        return [*self._fixed, *map(_digest, keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes | None) -> str | None:
        """Return a name for the key if it is valid. Takes the same time for every key."""
        if key is None:
            return None
        wanted = _digest(key)
        found = [digest for digest in self._digests if secrets.compare_digest(wanted, digest)]
        return found[0].hex() if found else None

    def has_name(self, name: str) -> bool:
        """Whether it is the name of a valid key."""
        return any(digest.hex() == name for digest in self._digests)

    def reload(self) -> None:
        """Read the file again, if there is one. If that fails, the keys stay as they are."""
        if self.file is None:
            return
        try:
            self._digests = self._read()
        except InvalidSetting as error:
            logger.error("API keys were not reloaded: %s", error)
        else:
            logger.warning("API keys reloaded from %s: %d are valid", self.file, len(self._digests))


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
        self._domains = tuple(host.removeprefix(ANY) for host in self._hosts if host.startswith("*."))
        self._origins = set(origins)

    def check(self, host: str | None, origin: str | None) -> None:
        """Check a request. Without these headers it was not sent by a browser.

        Raises:
            Forbidden
        """
        if host is not None and ANY not in self._hosts:
            name = hostname(f"//{host}")
            if name not in self._hosts and not name.endswith(self._domains) and _address_of(name) is None:
                raise Forbidden(
                    f"without an API key this server does not answer to the name {host[:LONGEST_SHOWN]!r}; use its IP "
                    "address, or start it with --allowed-hosts NAME"
                )
        if origin is None or ANY in self._origins or origin in self._origins or is_loopback(hostname(origin)):
            return
        if host is None or origin.partition("://")[2].lower() != host.lower():
            raise Forbidden(
                f"without an API key web pages of {origin[:LONGEST_SHOWN]!r} may not call this server; to allow it, "
                "start the server with --allowed-origins '[\"ORIGIN\"]'"
            )


@dataclass(frozen=True, slots=True)
class Access:
    """Check callers against the kind of the route.

    ``keys``: for routes that do not change the server; without any, these need no key. ``admin_keys``: for every route.
    ``dangerous``: whether admins may call dangerous routes. ``sites``: for callers without a key, whose requests a web
    page may have sent: what these may name.
    """

    keys: Keys = field(default_factory=Keys)
    admin_keys: Keys = field(default_factory=Keys)
    dangerous: bool = False
    sites: Sites = field(default_factory=Sites)

    @property
    def needs_key(self) -> bool:
        """Whether any route needs a key."""
        return bool(self.keys or self.admin_keys)

    def may_call(self, name: str | None) -> bool:
        """Whether a caller of that name can still send requests; ``None`` for those without a key."""
        if name is None:
            return not self.keys
        return self.keys.has_name(name) or self.admin_keys.has_name(name)

    def reload_keys(self) -> None:
        """Read the key files again."""
        self.keys.reload()
        self.admin_keys.reload()

    def check(self, access: RouteAccess, what: str, key: bytes | None, sender: Sender) -> Caller:
        """Check a request, and return its caller. ``what``: method and path, for messages. ``key``: as sent.

        Raises:
            Unauthorized, Forbidden
        """
        if access is RouteAccess.PUBLIC:
            return Caller()
        if access is RouteAccess.DANGEROUS and not self.dangerous:
            raise Forbidden(
                f"{what} is disabled because it runs code or writes files that its caller chooses; to enable it, start "
                "the server with --allow-dangerous-routes"
            )
        if (admin := self.admin_keys.find(key)) is not None:
            return Caller(admin, is_admin=True)
        name = self.keys.find(key)
        if self.keys and name is None:
            raise Unauthorized(SEND_A_KEY)
        if name is None:
            self.sites.check(sender.host, sender.origin)
        if access is RouteAccess.USE:
            return Caller(name)
        # The caller has no valid admin key.
        if self.admin_keys:
            if key is None:
                raise Unauthorized(f"{what} changes the server; {SEND_A_KEY.replace('a key', 'an admin key')}")
            raise Forbidden(f"{what} changes the server; it needs an admin key")
        if not sender.is_here:
            raise Forbidden(
                f"{what} changes the server; without admin keys only callers on this machine may do that; start the "
                "server with DARTS_ADMIN_API_KEY or --admin-api-key-file, and send Authorization: Bearer KEY"
            )
        return Caller(name)


def check_listening(host: str, access: Access, allow_unauthenticated: bool) -> None:
    """Check that a server without API keys listens on loopback only, unless that is allowed.

    Raises:
        InvalidSetting
    """
    if not (allow_unauthenticated or access.keys or is_loopback(host)):
        raise InvalidSetting(
            f"--host {host} is reachable from other machines, and there is no API key: set VLLM_API_KEY or "
            "--api-key-file, or allow it with --allow-unauthenticated"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
    if (address := _address_of(host)) is None:
        return host == LOCAL_NAME
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
