"""A replica that is reached over HTTP."""

from collections.abc import AsyncIterator, Sequence
from itertools import cycle

import httpx

from darts_server.ingress.replicas.replica import Disconnected, Headers, Outgoing, Unreachable

CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 3.0
"""Idle connections are closed before the server does it, after five seconds: a request must not meet a closing one."""
POOLS = 8
"""For each request httpx looks at all connections of its pool."""
TIMEOUT = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
"""An answer may take hours. Requests to a replica that no longer answers are ended by the poller."""


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
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error}") from error
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
