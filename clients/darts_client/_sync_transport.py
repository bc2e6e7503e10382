# Generated from _async_transport.py by scripts/sync_client: edit that file instead.
"""A pool of connections to one server, and the only calls of httpx."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import ServerSentEvent

from ._errors import DartsError, raise_for_status, translate_errors
from ._io import read_sse, sleep
from ._requests import RetrySchedule, TimeLimit, TransportOptions, auth_headers, root_url

# No limit of connections: the caller bounds the requests in flight, and one that waits here would only time out here.
# uvicorn closes an idle connection after 5 s; reusing it at that moment fails, so it is dropped earlier.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)


class Transport:
    """Sends requests, with retries, and reads event streams. All failures are raised as a DartsError."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        options: TransportOptions,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.options = options
        self._http = httpx.Client(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=options.request_timeout(),
            limits=_LIMITS,
            transport=transport,
        )

    def request(
        self, method: str, path: str, *, idempotent: bool = True, retry_overloaded: bool = True, **options: Any
    ) -> httpx.Response:
        """Send a request until it succeeds, as far as that is safe. `options` are httpx's.

        `idempotent`: serving the request twice has the effect of serving it once. `retry_overloaded`: whether to wait
        for a server that accepts no work at the moment.
        """
        schedule = RetrySchedule(self.options.retries, idempotent=idempotent, retry_overloaded=retry_overloaded)
        while True:
            try:
                return self.send(method, path, **options)
            except DartsError as exc:
                delay = schedule.delay_after(exc)
            sleep(delay)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request once and read the whole response."""
        with translate_errors(f"{method} {path}"):
            response = self._http.request(method, path, **options)
        raise_for_status(response)
        return response

    @contextmanager
    def stream_events(
        self, method: str, path: str, limit: TimeLimit, **options: Any
    ) -> Generator[Iterator[ServerSentEvent]]:
        """Iterate over the server-sent events of one response. Comments, too, keep it from timing out."""
        timeout = self.options.stream_timeout(limit)
        with translate_errors(f"{method} {path}"):
            with self._http.stream(method, path, timeout=timeout, **options) as response:
                if not response.is_success:
                    response.read()
                raise_for_status(response)
                # httpx has a timeout for each read, and none for the whole response.
                response.stream = _LimitedStream(response.stream, limit)
                with read_sse(response) as events:
                    yield events

    def close(self) -> None:
        self._http.close()


class _LimitedStream(httpx.SyncByteStream):
    """The bytes of a response, until the time limit."""

    def __init__(self, stream: object, limit: TimeLimit) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self._stream = stream
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._limit.raise_if_over()
            yield chunk

    def close(self) -> None:
        self._stream.close()
