"""Which headers are passed on, in both directions."""

from collections.abc import Iterable

from starlette.types import Scope

from darts_server.http.security.access import Sender
from darts_server.http.security.middleware import sender_of
from darts_server.ingress.replicas.replica import Headers

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade expect".split()
)
"""They concern one connection alone (RFC 9110, 7.6.1)."""
REPLACED = frozenset((b"host", b"content-length", b"origin"))
"""Host and length are those of the request to the replica; the ingress has checked the origin."""
FORWARDED_FOR = b"x-forwarded-for"


def sender(scope: Scope) -> Sender:
    """Where a request comes from."""
    return sender_of(scope, dict(reversed(scope["headers"])))


def to_replica(scope: Scope) -> Headers:
    """Return a request's headers for a replica.

    Unless the caller is on this machine, they say that the request was forwarded: to a replica on this machine it would
    otherwise look as if it came from here, from where the server may be changed without a key.
    """
    headers: Headers = scope["headers"]
    passed = [(name, value) for name, value in _end_to_end(headers) if name not in REPLACED]
    who = sender(scope)
    if who.is_here:
        return passed
    hops = [value for name, value in passed if name == FORWARDED_FOR]
    others = [(name, value) for name, value in passed if name != FORWARDED_FOR]
    return [*others, (FORWARDED_FOR, b", ".join([*hops, who.address.encode() or b"unknown"]))]


def to_caller(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers for its caller."""
    return [(name.lower(), value) for name, value in _end_to_end(headers)]


def without_length(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() != b"content-length"]


def _end_to_end(headers: Headers) -> Headers:
    lines = (value for name, value in headers if name.lower() == b"connection")
    named = {part.strip().lower() for line in lines for part in line.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP and name.lower() not in named]
