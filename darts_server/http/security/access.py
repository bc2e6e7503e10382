"""Decide who may call which route, by API key or by address.

For requests without a key, also check the host name of the server, and the web page that sends the request.
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
MAX_SHOWN_CHARS = 100


class RouteAccess(Enum):
    PUBLIC = "public"
    """Everyone."""
    USE = "use"
    """Callers with a key, or everyone if the server has no keys."""
    ADMIN = "admin"
    """Callers with an admin key, or callers on this machine if the server has no admin keys. For routes that change the
    server."""
    DANGEROUS = "dangerous"
    """No caller by default; if enabled, as `ADMIN`. For routes that run code or write files of the caller's choice, or
    bypass weight updates."""


@dataclass(frozen=True, slots=True)
class Sender:
    address: str
    """Address of the caller; empty if unknown, as on a Unix socket."""
    host: str | None = None
    """The header ``Host``."""
    origin: str | None = None
    """The header ``Origin``."""
    is_forwarded: bool = False
    """Whether a proxy has sent the request. Then the address is the proxy's, or anyone could have chosen it."""

    @property
    def is_local(self) -> bool:
        """Whether a program or web page of this machine has sent the request."""
        if self.origin is not None and not is_loopback(host_of(self.origin)):
            return False
        return is_loopback(self.address) and not self.is_forwarded


class Keys:
    """API keys from arguments and from a file, one per line. Lines that begin with ``#`` are comments."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        """
        Raises:
            InvalidSetting: the file cannot be read, or has no key.
        """
        self.file = file
        self._argument_digests = [_digest(key.encode()) for key in keys]
        self._digests = self._read_digests()

    def _read_digests(self) -> list[bytes]:
        if self.file is None:
            return self._argument_digests
        try:
            text = read_file(self.file, MAX_KEY_FILE_BYTES)
        except OSError as error:
            raise InvalidSetting(f"key file {self.file} cannot be read: {error.strerror}") from error

        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith(b"#")]
        if not keys:
            rule = "must have keys, one per line; lines that begin with # are comments"
            raise InvalidSetting(f"key file {self.file} {rule}")
        return self._argument_digests + [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find_name(self, key: bytes | None) -> str | None:
        """Return a valid key's name, its digest in hex; else None."""
        if key is None:
            return None
        sent_digest = _digest(key)
        # Every digest is compared, so that the time tells nothing about a key.
        matching = [digest for digest in self._digests if secrets.compare_digest(sent_digest, digest)]
        if not matching:
            return None
        return matching[0].hex()

    def has_name(self, name: str) -> bool:
        return any(digest.hex() == name for digest in self._digests)

    def reload(self) -> None:
        """Read the file again. If that fails, the keys stay as they are."""
        if self.file is None:
            return
        try:
            self._digests = self._read_digests()
        except InvalidSetting as error:
            logger.error("API keys were not reloaded: %s", error)
        else:
            logger.warning("API keys reloaded from %s: %d are valid", self.file, len(self._digests))


class Sites:
    """Checks the headers that browsers set: ``Host``, which names the server, and ``Origin``, which names the web page.

    Args:
        hosts: names of this server, besides ``localhost`` and the machine's own names. ``*.example.com`` stands for all
            names below a domain, and ``*`` for every name.
        origins: origins of allowed web pages, such as ``https://example.com``, or ``*``. Pages of the server itself and
            of the browser's machine are always allowed.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        self._hosts = {LOCAL_NAME, machine, machine.partition(".")[0], *(host.lower() for host in hosts)}
        self._domain_suffixes = tuple(host.removeprefix(ANY) for host in self._hosts if host.startswith("*."))
        self._origins = set(origins)

    def check(self, host: str | None, origin: str | None) -> None:
        """Check a request, or raise `Forbidden`. A request without the headers does not come from a browser."""
        # A browser sends requests for every page that it shows, but only a page's own site may read the answers. If the
        # owner of a name lets the name point at this server (DNS rebinding), the server is that site. So only the
        # server's own names are allowed. An IP address needs no check, because no DNS record changes its target.
        if host is not None and ANY not in self._hosts:
            name = host_of(f"//{host}")
            if name not in self._hosts and not name.endswith(self._domain_suffixes) and _parse_address(name) is None:
                raise Forbidden(
                    f"without an API key this server does not answer to the name {host[:MAX_SHOWN_CHARS]!r}; use its "
                    "IP address, or start it with --allowed-hosts NAME"
                )

        if origin is None or ANY in self._origins or origin in self._origins or is_loopback(host_of(origin)):
            return
        origin_host = origin.partition("://")[2].lower()
        if host is None or origin_host != host.lower():
            raise Forbidden(
                f"without an API key web pages of {origin[:MAX_SHOWN_CHARS]!r} may not call this server; to allow it, "
                "start the server with --allowed-origins '[\"ORIGIN\"]'"
            )


@dataclass(frozen=True, slots=True)
class Access:
    keys: Keys = field(default_factory=Keys)
    """Keys for routes that do not change the server. If there are none, these routes need no key."""
    admin_keys: Keys = field(default_factory=Keys)
    """Keys for every route."""
    allow_dangerous: bool = False
    sites: Sites = field(default_factory=Sites)
    """Checks callers without a key, because a web page may have sent their requests."""

    @property
    def needs_key(self) -> bool:
        return bool(self.keys or self.admin_keys)

    def may_call(self, name: str | None) -> bool:
        """Return whether a caller can still send requests. ``name``: None for callers without a key."""
        if name is None:
            return not self.keys
        return self.keys.has_name(name) or self.admin_keys.has_name(name)

    def reload_keys(self) -> None:
        self.keys.reload()
        self.admin_keys.reload()

    def identify_caller(
        self,
        access: RouteAccess,
        request_line: str,
        key: bytes | None,
        sender: Sender,
    ) -> Caller:
        """Return the caller, or raise `Unauthorized` or `Forbidden`. ``request_line``: method and path."""
        if access is RouteAccess.PUBLIC:
            return Caller()
        if access is RouteAccess.DANGEROUS and not self.allow_dangerous:
            raise Forbidden(
                f"{request_line} is disabled because it runs code or writes files that its caller chooses; to enable "
                "it, start the server with --allow-dangerous-routes"
            )

        admin_name = self.admin_keys.find_name(key)
        if admin_name is not None:
            return Caller(admin_name, is_admin=True)
        name = self.keys.find_name(key)
        if self.keys and name is None:
            raise Unauthorized(SEND_A_KEY)
        # Only a request without a key can come from a foreign web page: a browser sends no key by itself.
        if name is None:
            self.sites.check(sender.host, sender.origin)
        if access is RouteAccess.USE:
            return Caller(name)

        # The route changes the server, and the caller has no valid admin key.
        if self.admin_keys:
            if key is None:
                raise Unauthorized(f"{request_line} changes the server; {SEND_A_KEY.replace('a key', 'an admin key')}")
            raise Forbidden(f"{request_line} changes the server; it needs an admin key")
        if not sender.is_local:
            raise Forbidden(
                f"{request_line} changes the server; without admin keys only callers on this machine may do that; "
                "start the server with DARTS_ADMIN_API_KEY or --admin-api-key-file, and send Authorization: Bearer KEY"
            )
        return Caller(name)


def check_listening(host: str, access: Access, allow_unauthenticated: bool) -> None:
    """Raise `InvalidSetting` if a server without keys listens beyond loopback, unless the operator allows it."""
    if not (allow_unauthenticated or access.keys or is_loopback(host)):
        raise InvalidSetting(
            f"--host {host} is reachable from other machines, and there is no API key: set VLLM_API_KEY or "
            "--api-key-file, or allow it with --allow-unauthenticated"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, without port; empty if it has none or an invalid port."""
    try:
        parts = urlsplit(url)
        # Raises ValueError if the port is invalid.
        _ = parts.port
        return parts.hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    address = _parse_address(host)
    if address is None:
        return host == LOCAL_NAME
    # A socket for both protocols gives IPv4 addresses as ::ffff:127.0.0.1.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _parse_address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
