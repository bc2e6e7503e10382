"""The I/O, blocking and not: a pool of connections to one server, and the only calls of httpx."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent

from ._calls import Call
from ._errors import DartsError
from ._retries import Patience, Retrying
from ._time_limit import TimeLimit
from ._translation import checked, translated

T = TypeVar("T")

# No limit of connections: the caller bounds what runs at once, and a request that queues here would only time out here.
# uvicorn drops an idle connection after 5 s; reusing it at that moment fails, so ours go earlier.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)


class AsyncConnection:
    def __init__(
        self, base_url: str, api_key: str | None, patience: Patience, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.patience = patience
        self._http = httpx.AsyncClient(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=whole_timeout(patience),
            limits=_LIMITS,
            transport=transport,
        )

    async def answer(self, call: Call[T]) -> T:
        """What the call asks for, tried again as far as that is safe; anything else is raised as a DartsError."""
        retrying = Retrying(self.patience.retries, idempotent=call.idempotent)
        while True:
            try:
                return call.parse(await self.send(call.method, call.path, **call.options))
            except DartsError as exc:
                delay = retrying.delay_after(exc)
            await asyncio.sleep(delay)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The successful response to one try, read to its end; anything else is raised as a DartsError."""
        with translated(f"{method} {path}"):
            response = await self._http.request(method, path, **options)
        return checked(response)

    @asynccontextmanager
    async def events(
        self, method: str, path: str, limit: TimeLimit, **options: Any
    ) -> AsyncGenerator[AsyncIterator[ServerSentEvent], None]:
        """The events of one response as they come. Whatever comes is a sign of life, comments too."""
        timeout = stream_timeout(self.patience, limit)
        with translated(f"{method} {path}"):
            async with self._http.stream(method, path, timeout=timeout, **options) as response:
                if not response.is_success:
                    await response.aread()
                checked(response).stream = _AsyncLimited(response.stream, limit)
                async with aclosing(EventSource(response).aiter_sse()) as source:
                    yield source

    async def aclose(self) -> None:
        await self._http.aclose()


class Connection:
    def __init__(
        self, base_url: str, api_key: str | None, patience: Patience, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.patience = patience
        self._http = httpx.Client(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=whole_timeout(patience),
            limits=_LIMITS,
            transport=transport,
        )

    def answer(self, call: Call[T]) -> T:
        """What the call asks for, tried again as far as that is safe; anything else is raised as a DartsError."""
        retrying = Retrying(self.patience.retries, idempotent=call.idempotent)
        while True:
            try:
                return call.parse(self.send(call.method, call.path, **call.options))
            except DartsError as exc:
                delay = retrying.delay_after(exc)
            time.sleep(delay)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The successful response to one try, read to its end; anything else is raised as a DartsError."""
        with translated(f"{method} {path}"):
            response = self._http.request(method, path, **options)
        return checked(response)

    @contextmanager
    def events(
        self, method: str, path: str, limit: TimeLimit, **options: Any
    ) -> Generator[Iterator[ServerSentEvent], None, None]:
        """The events of one response as they come. Whatever comes is a sign of life, comments too."""
        timeout = stream_timeout(self.patience, limit)
        with translated(f"{method} {path}"), self._http.stream(method, path, timeout=timeout, **options) as response:
            if not response.is_success:
                response.read()
            checked(response).stream = _Limited(response.stream, limit)
            yield EventSource(response).iter_sse()

    def close(self) -> None:
        self._http.close()


class _AsyncLimited(httpx.AsyncByteStream):
    """A response's bytes, as long as there is time."""

    def __init__(self, stream: object, limit: TimeLimit) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._limit.check()
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Limited(httpx.SyncByteStream):
    """A response's bytes, as long as there is time."""

    def __init__(self, stream: object, limit: TimeLimit) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self._stream = stream
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._limit.check()
            yield chunk

    def close(self) -> None:
        self._stream.close()


def whole_timeout(patience: Patience) -> httpx.Timeout:
    """For an answer that comes whole: a long silence is the generation."""
    return httpx.Timeout(patience.timeout, connect=patience.connect_timeout)


def stream_timeout(patience: Patience, limit: TimeLimit) -> httpx.Timeout:
    """For a stream: a long silence is a lost connection."""
    connect, read = limit.at_most(patience.connect_timeout), limit.at_most(patience.idle_timeout)
    return httpx.Timeout(patience.timeout, connect=connect, read=read)


def root_url(base_url: str) -> str:
    """The server's root, whether or not the URL names the API below it.

    >>> root_url("http://localhost:8000/v1/")
    'http://localhost:8000'
    """
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}")
    return base_url.rstrip("/").removesuffix("/v1")


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
