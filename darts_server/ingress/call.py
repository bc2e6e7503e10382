"""One request to the ingress."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from darts_server.ingress.forwarding.headers import to_caller, without_length
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.replicas.whole import WholeAnswer


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was received whole.

    ``outgoing``: what a replica gets of it. ``received_at``: on the clock of ``time.perf_counter``.
    """

    request: Request
    path: str
    outgoing: Outgoing
    reply: Reply
    received_at: float

    @property
    def body(self) -> bytes:
        assert isinstance(self.outgoing.body, bytes), "it was received whole"
        return self.outgoing.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers


def to_response(answer: WholeAnswer) -> Response:
    """Return a replica's answer for the caller."""
    response = Response(answer.body, answer.status)
    response.raw_headers += without_length(to_caller(answer.headers))
    return response
