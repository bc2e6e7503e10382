"""A replica: something that answers the requests of a server."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to a replica.

    ``target``: path and query, as they were received. ``body``: one that is not bytes is sent as it comes, once.
    """

    method: str
    target: str
    headers: Headers = ()
    body: bytes | AsyncIterable[bytes] = b""


class Answer(Protocol):
    """A response whose body is still to be received. It must be closed."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            Disconnected
        """
        ...

    async def aclose(self) -> None:
        """Drop what has not been received yet; the replica stops working on the request."""
        ...


class Replica(Protocol):
    """Answers requests. Cancelling a call cancels the request."""

    @property
    def name(self) -> str:
        """A short name, the same in every ingress: a label of metrics."""
        ...

    async def send(self, request: Outgoing) -> Answer:
        """Send a request, and return its answer when the status is known.

        Raises:
            Unreachable, NoResources, Disconnected
        """
        ...

    async def aclose(self) -> None: ...


def value_of(headers: Headers, name: bytes) -> bytes:
    """Return the first value of a header; empty if there is none."""
    return next((value for each, value in headers if each.lower() == name), b"")


class ReplicaFailure(Exception):
    """A replica did not answer a request, or not to the end."""


class Unreachable(ReplicaFailure):
    """The replica refuses connections, or the request: it has not run it."""


class NoResources(ReplicaFailure):
    """This machine could not open a connection, such as for want of file descriptors: the replica may be well."""


class Disconnected(ReplicaFailure):
    """The connection was lost, or could not be made in time: the replica may have seen the request."""
