"""Check requests before they are handled, and read their bodies."""

from dataclasses import replace

from starlette.requests import Request

from darts_server.http.body import read_body
from darts_server.http.security.access import Sites
from darts_server.ingress.forwarding.headers import sender, to_replica
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.routes import is_public


class Guard:
    """Checks what the replicas cannot check behind an ingress: the name by which it was called, and the web page.

    Keys are checked by the replicas. As long as one of them needs none, these checks are made, as `serve` makes them
    for callers without a key.
    """

    def __init__(self, fleet: Fleet, sites: Sites, max_body_bytes: int) -> None:
        self._fleet = fleet
        self._sites = sites
        self._max_body_bytes = max_body_bytes

    def check(self, request: Request, path: str) -> None:
        """
        Raises:
            Forbidden
        """
        if not self._fleet.needs_key and not is_public(request.method, path):
            who = sender(request.scope)
            self._sites.check(who.host, who.origin)

    async def read(self, request: Request) -> Outgoing:
        """Read a whole request.

        Raises:
            TooLarge, IncompleteBody
        """
        return replace(self.head(request), body=await read_body(request, self._max_body_bytes))

    def head(self, request: Request) -> Outgoing:
        """Return a request without its body."""
        path = request.scope.get("raw_path") or request.scope["path"].encode()
        query = request.scope["query_string"]
        target = (path + b"?" + query if query else path).decode("latin-1")
        return Outgoing(request.method, target, to_replica(request.scope))
