"""All replicas of an ingress, and the polls that find out which of them serve."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, TypeVar

from darts_server.ingress.replicas.member import Member, State
from darts_server.ingress.replicas.replica import NoResources, Outgoing, Replica, ReplicaFailure, Unreachable, value_of
from darts_server.ingress.replicas.whole import WholeAnswer, fetch

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH = Outgoing("GET", "/health")
MODELS = Outgoing("GET", "/v1/models")
"""Needs a key where the server has any."""
MAX_MISSED = 3
"""Polls in a row without an answer after which a replica counts as lost. A busy API process may miss one."""
RETRY_AFTER = b"retry-after"
"""Servers that stop in order send it, and those whose engine is dead do not."""
OPEN = (
    "it serves callers without a key, and this ingress listens for other machines: start the server with --api-key, or "
    "the ingress with --allow-unauthenticated"
)


@dataclass(frozen=True, slots=True)
class PollSettings:
    """``interval``: seconds between two polls. ``timeout``: seconds for an answer.

    ``allow_open``: whether servers are used that need no key.
    """

    interval: float = 2.0
    timeout: float = 5.0
    allow_open: bool = True


class Fleet:
    """All replicas."""

    def __init__(self, replicas: Sequence[Replica], settings: PollSettings | None = None) -> None:
        self.members = [Member(replica) for replica in replicas]
        self._settings = settings or PollSettings()
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[Any]] = set()

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members if member.serves]

    @property
    def reachable(self) -> list[Member]:
        """Those that answer, also while they drain."""
        return [member for member in self.members if member.state in (State.SERVING, State.UNHEALTHY)]

    @property
    def unreachable(self) -> list[Member]:
        return [member for member in self.members if member not in self.reachable]

    @property
    def needs_key(self) -> bool:
        """Whether every replica serves callers with a key only, as far as is known."""
        return all(member.needs_key for member in self.members)

    @asynccontextmanager
    async def polled(self) -> AsyncIterator[Self]:
        """Poll all replicas once, and again and again until the block ends.

        Then their connections are closed, after what must not end half-way.
        """
        await asyncio.gather(*map(self.check, self.members))
        polling = [asyncio.create_task(self._poll(member)) for member in self.members]
        try:
            yield self
            if self._finishing:
                logger.info("wait until an update that has begun has ended")
                await asyncio.wait(self._finishing)
        finally:
            for task in [*polling, *self._checks.values()]:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            for member in self.members:
                await member.replica.aclose()

    async def check(self, member: Member) -> None:
        """Find out now how a replica is. Callers at the same time share one poll, which begins after their calls."""
        if (earlier := self._checks.get(member.name)) is not None:
            await asyncio.shield(earlier)
        running = self._checks.get(member.name)
        if running is None:
            running = self._checks[member.name] = asyncio.create_task(self._check(member))
            running.add_done_callback(lambda _: self._checks.pop(member.name, None))
        await asyncio.shield(running)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work with the replicas that must not end half-way, also if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _poll(self, member: Member) -> None:
        while True:
            await asyncio.sleep(self._settings.interval)
            await self.check(member)

    async def _check(self, member: Member) -> None:
        before = member.state
        try:
            async with asyncio.timeout(self._settings.timeout):
                health, models = await fetch(member.replica, HEALTH), await fetch(member.replica, MODELS)
        except Unreachable as error:
            member.change(State.LOST, str(error))
        except NoResources as error:
            logger.warning("%s: it stays %s; raise the limit of open files (ulimit -n)", error, before)
        except (ReplicaFailure, TimeoutError) as error:
            self._miss(member, str(error) or "timeout")
        except Exception as error:  # without this its polls would end
            logger.exception("the poll of %s failed", member.name)
            self._miss(member, repr(error))
        else:
            member.missed = 0
            member.is_stopping = health.status != HTTPStatus.OK and bool(value_of(health.headers, RETRY_AFTER))
            member.needs_key = models.status == HTTPStatus.UNAUTHORIZED
            member.change(*self._judge(health, models))
        if member.state is not before:
            level = logging.INFO if member.serves else logging.WARNING
            logger.log(level, "replica %s is %s%s", member.name, member.state, member.detail and f": {member.detail}")

    def _miss(self, member: Member, why: str) -> None:
        member.missed += 1
        if member.missed >= MAX_MISSED or member.state in (State.UNKNOWN, State.LOST):
            member.change(State.LOST, f"it does not answer: {why}")

    def _judge(self, health: WholeAnswer, models: WholeAnswer) -> tuple[State, str]:
        if health.status != HTTPStatus.OK:
            return State.UNHEALTHY, _message(health)
        if models.status == HTTPStatus.FORBIDDEN:
            return State.REFUSED, _message(models)  # it does not know the name by which it is addressed
        if models.status == HTTPStatus.OK and not self._settings.allow_open:
            return State.REFUSED, OPEN
        return State.SERVING, ""


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log why work failed whose caller was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("work went on without its caller, and failed: %s", error)


def _message(answer: WholeAnswer) -> str:
    """Return the message of an error, or its status."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(answer.body)["error"]["message"])
    return f"status {answer.status}"
