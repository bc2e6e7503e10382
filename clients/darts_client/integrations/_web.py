"""A small ASGI app of routes that take and return JSON objects, closed to web pages."""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from .._errors import DartsError, StatusError

Json = dict[str, Any]
Route = Callable[[Json, Mapping[str, str]], Awaitable[Json]]
"""Takes a request's body and headers."""
LOCAL_NAME = "localhost"


class JsonApp:
    """Answers at its addresses, at `localhost`, and at the names `hosts`.

    Args:
        routes: by path, for `POST`.
        safe: paths of those that change nothing, and take any method.
    """

    def __init__(self, routes: Mapping[str, Route], safe: Collection[str], hosts: Collection[str]) -> None:
        self._routes = routes
        self._safe = safe
        self._hosts = {LOCAL_NAME, *(host.strip().lower() for host in hosts)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status, answer = await self._answer(scope, receive)
            headers = [(b"content-type", b"application/json")] + [(b"allow", b"POST")] * (status == 405)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, Json]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if reason := self._refusal(headers):
            return 403, {"error": reason}
        if (route := self._routes.get(scope["path"])) is None:
            return 404, {"error": f"{scope['path']} is not served; there are {', '.join(self._routes)}"}
        if scope["method"] != "POST" and scope["path"] not in self._safe:
            return 405, {"error": f"{scope['path']} takes POST only"}
        try:
            return 200, await route(json.loads(await _read_body(receive) or b"{}"), headers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return 400, {"error": f"{type(error).__name__}: {error}"}
        except DartsError as error:
            return (error.status_code if isinstance(error, StatusError) else 502), {"error": str(error)}

    def _refusal(self, headers: Mapping[str, str]) -> str | None:
        """Return why a request is refused that a web page may have sent.

        Browsers name the page in `Origin` or `Sec-Fetch-Site`, but not in a GET of a page whose own name points to this
        machine (DNS rebinding). That name is in `Host`.
        """
        if "origin" in headers or "sec-fetch-site" in headers:
            return "web pages may not call this: it may have an admin key"
        if (host := headers.get("host")) is None or self._is_own(host):
            return None
        return f"this does not answer to the name {host[:100]!r}; use its address, or add the name to its hosts"

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name in self._hosts
        return True


async def _read_body(receive: Any) -> bytes:
    body, is_open = b"", True
    while is_open:
        message = await receive()
        body, is_open = body + message.get("body", b""), message.get("more_body", False)
    return body
