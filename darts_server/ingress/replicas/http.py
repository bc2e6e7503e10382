"""A replica that is reached over HTTP."""

import errno
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle

import httpx

from darts_server.ingress.replicas.replica import (
    Disconnected,
    Headers,
    NoResources,
    Outgoing,
    ReplicaFailure,
    Unreachable,
)

CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 3.0
"""Idle connections are closed before the server does it, after five seconds: a request must not meet a closing one."""
POOLS = 8
"""For each request httpx looks at all connections of its pool."""
TIMEOUT = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
"""An answer may take hours. Requests to a replica that no longer answers are ended by the poller."""
OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Errors of a connection that say nothing of the replica: the ingress's machine has run out of something."""


def connection_pools(url: str) -> list[httpx.AsyncBaseTransport]:
    """Create the connection pools of a replica."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
    # Without `verify` no root certificates are read, which takes 30 ms a pool.
    return [httpx.AsyncHTTPTransport(verify=url.startswith("https:"), limits=limits) for _ in range(POOLS)]


class HttpReplica:
    """A server at a URL.

    ``transports``: connection pools, which take turns; by default `connection_pools`.
    """

    def __init__(self, url: str, transports: Sequence[httpx.AsyncBaseTransport] | None = None) -> None:
        self._url = httpx.URL(url)
        self.name = self._url.netloc.decode()
        self._transports = connection_pools(url) if transports is None else transports
        self._turns = cycle(self._transports)

    async def send(self, request: Outgoing) -> "HttpAnswer":
        outgoing = httpx.Request(
            request.method,
            self._url.copy_with(raw_path=request.target.encode("latin-1")),
            headers=list(request.headers),
            content=request.body,
            extensions={"timeout": TIMEOUT},
        )
        try:
            return HttpAnswer(await next(self._turns).handle_async_request(outgoing))
        except httpx.ConnectError as error:
            raise _not_connected(self.name, error) from error
        except httpx.TransportError as error:
            raise Disconnected(f"the connection to {self.name} was lost: {error!r}") from error

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()


class HttpAnswer:
    """A response, as it was received: nothing is decoded."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Headers:
        return self._response.headers.raw

    async def chunks(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        try:
            async for chunk in self._response.stream:
                yield chunk
        except httpx.TransportError as error:
            raise Disconnected(f"the connection was lost: {error!r}") from error

    async def aclose(self) -> None:
        await self._response.aclose()


def _not_connected(name: str, error: httpx.ConnectError) -> ReplicaFailure:
    """Return why no connection was made. Every ``OSError`` is a ``ConnectError`` to httpx."""
    numbers = set(_errnos(error))
    if ours := numbers & OUR_OWN:
        reason = errno.errorcode[min(ours)]
        return NoResources(f"this machine cannot open another connection to {name} ({reason})")
    if numbers == {errno.ECONNREFUSED}:
        return Unreachable(f"{name} refuses connections")
    return Disconnected(f"{name} cannot be reached: {error}")


def _errnos(error: BaseException | None) -> Iterator[int]:
    """Yield the error numbers that caused an exception. A name with several addresses has one for each."""
    if isinstance(error, ExceptionGroup):
        for each in error.exceptions:
            yield from _errnos(each)
    elif isinstance(error, OSError) and error.errno is not None:
        yield error.errno
    elif error is not None:
        yield from _errnos(error.__cause__ or error.__context__)  # httpcore raises some of them "from None"
