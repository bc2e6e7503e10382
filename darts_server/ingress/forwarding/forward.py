"""Send a request to one replica and pass its answer on; run it again elsewhere if the replica is lost."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Protocol

from darts_server.exceptions import NoReplica, ReplicaLost
from darts_server.ingress.forwarding.reply import Reply
from darts_server.ingress.metrics import IngressMetrics, Result
from darts_server.ingress.replicas.fleet import RETRY_AFTER, Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import (
    Answer,
    Disconnected,
    NoResources,
    Outgoing,
    ReplicaFailure,
    Unreachable,
    value_of,
)
from darts_server.ingress.replicas.whole import opened

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5
"""``Retry-After`` while the ingress has no room for another connection."""
LOST = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INTERNAL_SERVER_ERROR)
"""Statuses of a replica that is stopping or whose engine died: the latter is what vLLM's own routes answer."""
MAX_ATTEMPTS = 6
MAX_ATTEMPTS_ON_ONE = 2
"""A connection may be lost though the replica is well."""
MAX_LOST = 2
"""Replicas that may be lost while the same request runs on them. It may be what ends them: it gets no other one."""


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
            ReplicaLost: two replicas were lost while it ran on them, or one after a part of its answer was sent.
        """
        failures: dict[str, int] = {}
        lost: list[str] = []
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
                if isinstance(error, NoResources):
                    raise no_resources(error) from error
                await self._fleet.check(member)
                if ran_until_lost(member, error) and member.name not in lost:
                    lost.append(member.name)
                if len(lost) == MAX_LOST:
                    raise lost_in_turn(lost, "this request") from error
                logger.warning("%s %s is run again: %s", outgoing.method, outgoing.target[:200], error)
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
            if answer.status in LOST:
                await self._check_alive(member, answer)
            placement.answered(answer.status, await reply.pass_on(answer))
            return answer.status

    async def _check_alive(self, member: Member, answer: Answer) -> None:
        """Find out whether a replica failed a request because it is stopping, or its engine is dead.

        One whose engine died ends within a second, maybe before it answers the poll.

        Raises:
            ReplicaFailure
        """
        await self._fleet.check(member)
        if not member.is_well:
            failure = Unreachable if value_of(answer.headers, RETRY_AFTER) else Disconnected
            raise failure(f"{member.name} answered {answer.status}: {member.detail}")


def ran_until_lost(member: Member, error: ReplicaFailure) -> bool:
    """Whether a replica that was polled just now was lost while it ran a request, which may be what ended it.

    One that has not run it, that is well, or that stops in order does not count.
    """
    return not (isinstance(error, Unreachable | NoResources) or member.is_well or member.is_stopping)


def lost_in_turn(names: Sequence[str], what: str) -> ReplicaLost:
    """Say that something has lost several replicas."""
    return ReplicaLost(
        f"the servers {' and '.join(names)} were lost one after the other while they ran {what}, which may be why: it "
        "is not run on another one; find the reason in their logs before you send it again"
    )


def no_resources(error: NoResources) -> NoReplica:
    """Say that no other connection can be opened."""
    return NoReplica(f"{error}: raise the ingress's limit of open files (ulimit -n), or retry later", RETRY_SECONDS)


def _broken(member: Member) -> ReplicaLost:
    return ReplicaLost(
        f"the server {member.name} was lost while it answered, and what it sent is incomplete: send the request again"
    )
