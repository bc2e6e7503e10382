"""Who may do what: keys, and callers of this machine."""

import hashlib
import logging
import secrets
from collections.abc import Sequence
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from darts_server.exceptions import Forbidden, InvalidSetting, Unauthorized

logger = logging.getLogger(__name__)

LOCAL_NAME = "localhost"
LARGEST_KEY_FILE = 1024 * 1024
"""Bytes; ten thousand keys have less."""
SEND_A_KEY = "send the header Authorization: Bearer KEY, with a key of this server"


class Kind(Enum):
    """Who may call a route."""

    PUBLIC = "public"
    """Everyone."""
    USE = "use"
    """Whoever has a key, if there are keys."""
    ADMIN = "admin"
    """It changes the server: whoever has an admin key; if there are none, callers of this machine alone."""
    DANGEROUS = "dangerous"
    """It runs what the caller says, or writes where it says: nobody, unless allowed at the start; then as `ADMIN`."""


class Keys:
    """Keys of one kind: those given at the start, and those in a file, one a line."""

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        """
        Raises:
            InvalidSetting: the file cannot be read, or has no key.
        """
        self._given = tuple(_digest(key.encode()) for key in given)
        self.file = file
        self._digests = self._given + _digests_in(file)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes | None) -> str | None:
        """A name for the key, if it is one of these. Takes as long for every key."""
        if key is None:
            return None
        given, found = _digest(key), None
        for digest in self._digests:
            if secrets.compare_digest(given, digest):
                found = digest.hex()
        return found

    def read_again(self) -> None:
        """Take the file's keys as they are now. Those from before stay if it cannot be read."""
        try:
            self._digests = self._given + _digests_in(self.file)
        except InvalidSetting as error:
            logger.error("the keys stay as they are: %s", error)
        else:
            logger.warning("%d keys are valid after %s was read again", len(self._digests), self.file)


class Access:
    """Whose requests are let through.

    Args:
        keys: open what anyone may use; none leave it open.
        admin_keys: open all.
        dangerous: whether dangerous routes are open to admins.
    """

    def __init__(self, keys: Keys | None = None, admin_keys: Keys | None = None, dangerous: bool = False) -> None:
        self.keys = keys or Keys()
        self.admin_keys = admin_keys or Keys()
        self._dangerous = dangerous

    @property
    def guarded(self) -> bool:
        """Whether any key is asked for."""
        return bool(self.keys or self.admin_keys)

    def read_again(self) -> None:
        """Take the keys in the files as they are now."""
        for keys in (self.keys, self.admin_keys):
            if keys.file is not None:
                keys.read_again()

    def check(self, kind: Kind, what: str, key: bytes | None, host: str, origin: str | None) -> str | None:
        """The name of the caller's key, if it has one that counts, and it is let through.

        Args:
            what: method and path, for messages.
            key: as it was sent.
            host: the caller's address.
            origin: of the web page that sent it, if one did.

        Raises:
            Unauthorized, Forbidden
        """
        if kind is Kind.PUBLIC:
            return None
        if kind is Kind.DANGEROUS and not self._dangerous:
            raise Forbidden(
                f"{what} is dangerous: it runs what its caller says; if you need it, start the server with "
                "--allow-dangerous-routes"
            )
        if self.admin_keys.find(key) is not None:
            return None
        name = self.keys.find(key)
        if self.keys and name is None:
            raise Unauthorized(SEND_A_KEY)
        if kind is not Kind.USE:
            self._check_admin(what, key, host, origin)
        return name

    def _check_admin(self, what: str, key: bytes | None, host: str, origin: str | None) -> None:
        """Of a caller without an admin key. A browser here would do it for any page that it shows."""
        if self.admin_keys:
            if key is None:
                raise Unauthorized(f"{what} changes the server; {SEND_A_KEY.replace('a key', 'an admin key')}")
            raise Forbidden(f"{what} changes the server; that takes an admin key")
        if not is_loopback(host) or (origin is not None and not is_loopback(_host_of(origin))):
            raise Forbidden(
                f"{what} changes the server, which without an admin key only this machine may; start the server with "
                "DARTS_ADMIN_API_KEY or --admin-api-key-file, and send Authorization: Bearer KEY"
            )


def check_listening(host: str, access: Access, allowed: bool) -> None:
    """Whether the server may listen there. ``allowed``: without a key, everywhere.

    Raises:
        InvalidSetting
    """
    if not (allowed or access.keys or is_loopback(host)):
        raise InvalidSetting(
            f"--host {host} lets other machines in, and there is no API key: set VLLM_API_KEY or --api-key-file, or "
            "say that it is meant so with --allow-unauthenticated"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine is at the address, or this name."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == LOCAL_NAME
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _digests_in(file: Path | None) -> tuple[bytes, ...]:
    if file is None:
        return ()
    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST_KEY_FILE + 1)
    except OSError as error:
        raise InvalidSetting(f"{file} with keys cannot be read: {error.strerror}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or len(text) > LARGEST_KEY_FILE:
        raise InvalidSetting(f"{file} must have keys, one a line, in at most {LARGEST_KEY_FILE} bytes")
    return tuple(_digest(key) for key in keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
