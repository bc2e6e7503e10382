"""Who may call our routes."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from darts_server.exceptions import Forbidden, Unauthorized

LOCAL_NAME = "localhost"
BEARER = HTTPBearer(auto_error=False, description="A key that the server was started with.")


def guard(keys: Sequence[str]) -> Callable[..., Any]:
    """Asks for ``Authorization: Bearer KEY``; compares in constant time. Without keys everyone may pass."""
    digests = [_digest(key) for key in keys]

    async def check(authorization: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        given = _digest("" if authorization is None else authorization.credentials)
        known = [secrets.compare_digest(given, digest) for digest in digests]
        if authorization is None or not any(known):
            raise Unauthorized("send the header Authorization: Bearer KEY, with a key the server was started with")

    async def pass_by() -> None:
        pass

    return check if digests else pass_by


def local_without(keys: Sequence[str]) -> Callable[..., Any]:
    """For routes that change the server. Without keys only this machine may, and no web page of another one.

    A browser here would otherwise do it for any page it shows: vLLM's CORS headers let it.
    """

    async def check(request: Request) -> None:
        if keys:
            return
        host = request.client.host if request.client else ""
        origin = request.headers.get("origin")
        if not _is_loopback(host) or (origin is not None and not _is_loopback(_host_of(origin))):
            raise Forbidden(
                f"{request.method} {request.url.path} changes the server, which without a key only this machine may; "
                "start the server with --api-key KEY and send Authorization: Bearer KEY"
            )

    return check


def _is_loopback(host: str) -> bool:
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
