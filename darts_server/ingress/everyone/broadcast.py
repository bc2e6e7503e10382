"""Send a request to several replicas at a time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import WholeAnswer, fetch

SUCCESS = range(200, 300)


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """What replicas answered, by their names, and why others did not."""

    answers: dict[str, WholeAnswer]
    failures: dict[str, str]

    @property
    def accepted(self) -> dict[str, WholeAnswer]:
        return {name: answer for name, answer in self.answers.items() if answer.status in SUCCESS}

    @property
    def refused(self) -> dict[str, WholeAnswer]:
        return {name: answer for name, answer in self.answers.items() if answer.status not in SUCCESS}


async def broadcast(members: Sequence[Member], request: Outgoing, timeout: float | None = None) -> BroadcastResult:
    """Send a request to all of these replicas, and wait for their answers.

    ``timeout``: seconds; ``None`` where an answer may take any time: it ends if the replica is lost.
    """
    return await broadcast_each([(member, request) for member in members], timeout)


async def broadcast_each(requests: Sequence[tuple[Member, Outgoing]], timeout: float | None = None) -> BroadcastResult:
    """Send each replica a request of its own, and wait for their answers."""
    results = await asyncio.gather(*(_send(member, request, timeout) for member, request in requests))
    answers, failures = {}, {}
    for (member, _), result in zip(requests, results, strict=True):
        if isinstance(result, WholeAnswer):
            answers[member.name] = result
        else:
            failures[member.name] = result
    return BroadcastResult(answers, failures)


async def _send(member: Member, request: Outgoing, timeout: float | None) -> WholeAnswer | str:
    try:
        async with asyncio.timeout(timeout), member.in_use():
            return await fetch(member.replica, request)
    except ReplicaFailure as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {timeout:.0f} s"
