"""The I/O, blocking and not: a pool of connections to one server, and the only calls of httpx."""

from typing import Any

import httpx

from ._translation import checked, translated

# No limit of connections: the caller bounds what runs at once, and a request that queues here would only time out here.
# uvicorn drops an idle connection after 5 s; reusing it at that moment fails, so ours go earlier.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)


class AsyncConnection:
    def __init__(
        self, base_url: str, api_key: str | None, timeout: float, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=timeout,
            limits=_LIMITS,
            transport=transport,
        )

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The successful response, read to its end; anything else is raised as a DartsError."""
        with translated(f"{method} {path}"):
            response = await self._http.request(method, path, **options)
        return checked(response)

    async def aclose(self) -> None:
        await self._http.aclose()


class Connection:
    def __init__(
        self, base_url: str, api_key: str | None, timeout: float, transport: httpx.BaseTransport | None
    ) -> None:
        self._http = httpx.Client(
            base_url=root_url(base_url),
            headers=auth_headers(api_key),
            timeout=timeout,
            limits=_LIMITS,
            transport=transport,
        )

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The successful response, read to its end; anything else is raised as a DartsError."""
        with translated(f"{method} {path}"):
            response = self._http.request(method, path, **options)
        return checked(response)

    def close(self) -> None:
        self._http.close()


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
