"""Weights that are pulled over HTTP, from hosts that the operator allowed."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from darts_server.exceptions import Forbidden, InvalidRequest

FIELD = "url"
CONNECT_SECONDS = 10.0
STALL_SECONDS = 60.0
"""A sender from whom nothing came for so long is taken for gone."""
MOST_REDIRECTS = 5


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """``names``: ``host``, or ``host:port`` for that port alone; an IPv6 address in brackets."""

    names: frozenset[str] = frozenset()

    def check(self, url: str) -> httpx.URL:
        """
        Raises:
            Forbidden: none are allowed.
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
                FIELD, f"is of {host}:{port}, and weights are pulled from {', '.join(sorted(self.names))} alone"
            )
        return parsed


async def pulled(
    hosts: AllowedHosts, url: str, limit: int, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[bytes]:
    """The bytes at ``url`` as they come, at most ``limit``. Redirects are followed on the same host.

    Raises:
        Forbidden, InvalidRequest: of ``url``.
    """
    target = hosts.check(url)
    timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS)
    # What the environment says of proxies and passwords is for the operator's own requests.
    async with httpx.AsyncClient(timeout=timeout, trust_env=False, transport=transport) as client:
        try:
            for _ in range(MOST_REDIRECTS + 1):
                async with client.stream("GET", target, headers={"Accept-Encoding": "identity"}) as answer:
                    if answer.next_request is None:
                        async for chunk in _within(answer, limit):
                            yield chunk
                        return
                    target = _next(target, answer.next_request.url)
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise InvalidRequest(FIELD, f"could not be pulled: {what}; try again") from error
    raise InvalidRequest(FIELD, f"leads to more than {MOST_REDIRECTS} redirects")


def _next(target: httpx.URL, other: httpx.URL) -> httpx.URL:
    if (other.scheme, other.host, other.port) != (target.scheme, target.host, target.port):
        raise InvalidRequest(FIELD, f"leads to another host, {other.host}; name what it leads to")
    return other


async def _within(answer: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    if answer.status_code != httpx.codes.OK:
        raise InvalidRequest(FIELD, f"answered {answer.status_code} {answer.reason_phrase}".rstrip())
    announced = answer.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() else 0
    too_large = InvalidRequest(FIELD, f"has more than {limit} bytes, which no set for this model has")
    if size > limit:
        raise too_large
    size = 0
    async for chunk in answer.aiter_raw():
        size += len(chunk)
        if size > limit:
            raise too_large
        yield chunk
