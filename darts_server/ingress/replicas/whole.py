"""Receive a whole answer of a replica."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO

from darts_server.ingress.replicas.replica import Answer, Headers, Outgoing, Replica


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer of a replica, to its end."""

    status: int
    headers: Headers
    body: bytes


async def fetch(replica: Replica, request: Outgoing) -> WholeAnswer:
    """Send a request, and receive the whole answer.

    Raises:
        ReplicaFailure
    """
    async with opened(replica, request) as answer:
        body = BytesIO()
        async for chunk in answer.chunks():
            body.write(chunk)
        return WholeAnswer(answer.status, answer.headers, body.getvalue())


@asynccontextmanager
async def opened(replica: Replica, request: Outgoing) -> AsyncIterator[Answer]:
    """Send a request; what is not received of its answer when the block ends is dropped.

    Raises:
        ReplicaFailure
    """
    async with aclosing(await replica.send(request)) as answer:
        yield answer
