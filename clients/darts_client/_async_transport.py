"""A pool of connections to one server. No other module calls httpx."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from httpx_sse import ServerSentEvent

from ._errors import DartsError, raise_for_status, translate_errors
from ._io import async_read_sse, async_sleep
from ._requests import RetrySchedule, TimeLimit, TransportOptions, auth_headers, root_url

# The number of connections has no limit: the caller limits the requests in flight, and a request that waits for a
# connection would only time out. uvicorn closes an idle connection after 5 s, and reusing the connection at that moment
# fails, so it is dropped earlier.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)


class AsyncTransport:
    """Sends requests, with retries, and reads event streams. Every failure is raised as a DartsError."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        options: TransportOptions,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.options = options
        self._http = httpx.AsyncClient(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=options.request_timeout(),
            limits=_LIMITS,
            transport=transport,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        idempotent: bool = True,
        **options: Any,
    ) -> httpx.Response:
        """Send a request, and send it again after an error if that is safe.

        Args:
            idempotent: whether serving the request twice has the effect of serving it once.
            options: httpx's options of the request.
        """
        schedule = RetrySchedule(self.options.retries, idempotent=idempotent)
        while True:
            try:
                return await self.send(method, path, **options)
            except DartsError as exc:
                delay = schedule.delay_after(exc)
            await async_sleep(delay)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request once, and read the whole response."""
        with translate_errors(f"{method} {path}"):
            response = await self._http.request(method, path, **options)
        raise_for_status(response)
        return response

    @asynccontextmanager
    async def stream_events(
        self,
        method: str,
        path: str,
        limit: TimeLimit,
        **options: Any,
    ) -> AsyncGenerator[AsyncIterator[ServerSentEvent]]:
        """Iterate over the server-sent events of one response. Comments, too, reset the idle timeout."""
        timeout = self.options.stream_timeout(limit)
        with translate_errors(f"{method} {path}"):
            async with self._http.stream(
                method,
                path,
                timeout=timeout,
                **options,
            ) as response:
                # The message of an error is in the body, which httpx has not read yet.
                if not response.is_success:
                    await response.aread()
                raise_for_status(response)
                # httpx has a timeout for each read, but none for the whole response.
                response.stream = _AsyncLimitedStream(response.stream, limit)
                async with async_read_sse(response) as events:
                    yield events

    async def aclose(self) -> None:
        await self._http.aclose()


class _AsyncLimitedStream(httpx.AsyncByteStream):
    """The bytes of a response, and TimedOut after the time limit."""

    def __init__(self, stream: object, limit: TimeLimit) -> None:
        # httpx declares the stream of a response as sync or async.
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._limit.raise_if_over()
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
