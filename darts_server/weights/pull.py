"""Pulls weights over HTTP, from hosts that the operator allowed."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from darts_server.exceptions import Forbidden, InvalidRequest

FIELD = "url"
CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0
"""After this long without a byte the sender is taken for dead."""
MAX_REDIRECTS = 5


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """``names``: ``host``, or ``host:port`` for that port only; an IPv6 address in brackets."""

    names: frozenset[str] = frozenset()

    def check(self, url: str) -> httpx.URL:
        """Parse a URL.

        Raises:
            Forbidden: no host is allowed.
            InvalidRequest: it is no URL, or of another host.
        """
        if not self.names:
            raise Forbidden("weights are pulled from no host; start the server with --weights-hosts HOST:PORT,…")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequest(FIELD, f"is no URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise InvalidRequest(FIELD, "must be http://HOST/… or https://HOST/…, with no name or password in it")
        host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
        port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
        if not self.names & {host, f"{host}:{port}"}:
            raise InvalidRequest(
                FIELD, f"is of {host}:{port}, and weights are pulled only from {', '.join(sorted(self.names))}"
            )
        return parsed


async def stream_url(
    hosts: AllowedHosts, url: str, limit: int, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[bytes]:
    """Yield the bytes at ``url`` as they arrive, at most ``limit``. Redirects are followed on the same host.

    Raises:
        Forbidden, InvalidRequest: of ``url``.
    """
    target = hosts.check(url)
    timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS)
    # No trust_env: the environment's proxies and passwords are for the operator's own requests, not for a caller's URL.
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, transport=transport) as client:
        try:
            for _ in range(MAX_REDIRECTS + 1):
                async with client.stream("GET", target, headers={"Accept-Encoding": "identity"}) as response:
                    if response.next_request is None:
                        async for chunk in _read(response, limit):
                            yield chunk
                        return
                    target = _check_redirect(target, response.next_request.url)
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise InvalidRequest(FIELD, f"could not be pulled: {what}; try again") from error
    raise InvalidRequest(FIELD, f"has more than {MAX_REDIRECTS} redirects")


def _check_redirect(origin: httpx.URL, target: httpx.URL) -> httpx.URL:
    if (target.scheme, target.host, target.port) != (origin.scheme, origin.host, origin.port):
        raise InvalidRequest(FIELD, f"redirects to another host, {target.host}; send that URL")
    return target


async def _read(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    if response.status_code != httpx.codes.OK:
        raise InvalidRequest(FIELD, f"answered {response.status_code} {response.reason_phrase}".rstrip())
    announced = response.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() else 0
    too_large = InvalidRequest(FIELD, f"has more than {limit} bytes, the most for weights of this model")
    if size > limit:
        raise too_large
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk
