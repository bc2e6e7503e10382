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
            Unreachable, Disconnected
        """
        ...

    async def aclose(self) -> None: ...


class ReplicaFailure(Exception):
    """A replica did not answer a request, or not to the end."""


class Unreachable(ReplicaFailure):
    """No connection to the replica could be made: it has not seen the request."""


class Disconnected(ReplicaFailure):
    """The connection was lost: the replica may have seen the request."""
