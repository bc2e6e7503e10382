"""Send a request to one replica and pass its answer on; run it again elsewhere if the replica is lost."""

import logging
import time
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Protocol

from darts_server.exceptions import ReplicaLost
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.metrics import IngressMetrics, Result
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Answer, Outgoing, ReplicaFailure, Unreachable
from darts_server.ingress.replicas.whole import opened

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
MAX_ATTEMPTS_ON_ONE = 2
"""A connection may be lost though the replica is well."""


class Placement(Protocol):
    """Where a request runs."""

    def choose(self, avoid: frozenset[str]) -> Member:
        """Choose a replica that serves, but for those with these names.

        Raises:
            NoReplica
        """
        ...

    def running_on(self, member: Member) -> AbstractContextManager[None]:
        """Count the request as running there."""
        ...

    def answered(self, status: int, body: bytes) -> None:
        """Learn from the answer. ``body``: its end, or all of it."""
        ...


class Forwarder:
    """Forward requests."""

    def __init__(self, fleet: Fleet, metrics: IngressMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def forward(self, outgoing: Outgoing, placement: Placement, reply: Reply, received_at: float) -> None:
        """Answer a request by one replica. ``received_at``: when it was complete, on the clock of ``reply``.

        Raises:
            NoReplica: none serves.
            ReplicaLost: the replicas were lost one after the other, or this one after a part of its answer was sent.
        """
        failures: dict[str, int] = {}
        for _ in range(MAX_ATTEMPTS):
            avoid = frozenset(name for name, count in failures.items() if count >= MAX_ATTEMPTS_ON_ONE)
            member = placement.choose(avoid)
            started = time.perf_counter()
            try:
                with placement.running_on(member):
                    async with member.in_use():
                        status = await self._run(member, outgoing, placement, reply)
            except ReplicaFailure as error:
                failures[member.name] = failures.get(member.name, 0) + 1
                if reply.begun:
                    self._metrics.request_ended(member.name, Result.BROKEN, time.perf_counter() - started)
                    await reply.break_off(_broken(member))
                    return
                self._metrics.request_ended(member.name, Result.RERUN, time.perf_counter() - started)
                logger.warning("%s %s is run again: %s", outgoing.method, outgoing.target[:200], error)
                await self._fleet.check(member)
            except BaseException:
                self._metrics.request_ended(member.name, Result.CANCELLED, time.perf_counter() - started)
                raise
            else:
                ended = time.perf_counter()
                self._metrics.request_ended(member.name, Result.of(status), ended - started)
                self._metrics.added(started - received_at + ended - reply.received_at)
                return
        raise ReplicaLost(f"{MAX_ATTEMPTS} attempts ended without an answer, as replicas were lost; send it again")

    async def _run(self, member: Member, outgoing: Outgoing, placement: Placement, reply: Reply) -> int:
        async with opened(member.replica, outgoing) as answer:
            if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                await self._check_alive(member, answer)
            placement.answered(answer.status, await reply.pass_on(answer))
            return answer.status

    async def _check_alive(self, member: Member, answer: Answer) -> None:
        """Find out whether a replica refused a request because it is stopping, or its engine is dead.

        Raises:
            ReplicaFailure
        """
        await self._fleet.check(member)
        if not member.serves:
            raise Unreachable(f"{member.name} answered {answer.status}: {member.detail}")


def _broken(member: Member) -> ReplicaLost:
    return ReplicaLost(
        f"the server {member.name} was lost while it answered, and what it sent is incomplete: send the request again"
    )
