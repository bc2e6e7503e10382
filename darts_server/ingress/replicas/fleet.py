"""All replicas of an ingress, and the polls that find out which of them serve."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, TypeVar

from darts_server.ingress.replicas.joining import Joining
from darts_server.ingress.replicas.member import Member, State
from darts_server.ingress.replicas.replica import NoResources, Outgoing, Replica, ReplicaFailure, Unreachable, value_of
from darts_server.ingress.replicas.sharing import Sharing
from darts_server.ingress.replicas.whole import WholeAnswer, fetch

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH = Outgoing("GET", "/health")
MODELS = Outgoing("GET", "/v1/models")
"""Needs a key where the server has any."""
MAX_MISSED = 3
"""Polls in a row without an answer after which a replica counts as lost. A busy API process may miss one."""
SHARE_SECONDS = 1.0
"""Between two turns in which a replica learns from the others, at most."""
RETRY_AFTER = b"retry-after"
"""Servers that stop in order send it, and those whose engine is dead do not."""
REACHABLE = (State.SERVING, State.JOINING, State.OUTDATED, State.UNHEALTHY)
OPEN = (
    "it serves callers without a key, and this ingress listens for other machines: start the server with --api-key, or "
    "the ingress with --allow-unauthenticated"
)


@dataclass(frozen=True, slots=True)
class PollSettings:
    """``interval``: seconds between two polls. ``timeout``: seconds for an answer.

    ``allow_open``: whether servers are used that need no key. ``key``: that copies weights and observations, see
    `Joining` and `Sharing`.
    """

    interval: float = 2.0
    timeout: float = 5.0
    allow_open: bool = True
    key: str = ""


class Fleet:
    """All replicas."""

    def __init__(self, replicas: Sequence[Replica], settings: PollSettings | None = None) -> None:
        self.members = [Member(replica) for replica in replicas]
        self.changing = asyncio.Lock()
        """Held while the weights of replicas change, or are compared."""
        self._settings = settings or PollSettings()
        self.joining = Joining(self.members, self.check, self.changing, self._settings.key)
        self.sharing = Sharing(self.members, self._settings.key)
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[Any]] = set()

    @property
    def serving(self) -> list[Member]:
        return [member for member in self.members if member.serves]

    @property
    def reachable(self) -> list[Member]:
        """Those that answer, also while they drain, or wait for weights."""
        return [member for member in self.members if member.state in REACHABLE]

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
        for member in self.members:
            self._start_polling(member)
        await self.joining.admit()
        joining = asyncio.create_task(self.joining.run(self._settings.interval))
        sharing = asyncio.create_task(self.sharing.run(min(self._settings.interval, SHARE_SECONDS)))
        try:
            yield self
            if self._finishing:
                logger.info("wait until an update that has begun has ended")
                await asyncio.wait(self._finishing)
        finally:
            await _cancel(joining, sharing, *self._polling.values())
            await _cancel(*self._checks.values())  # now nothing begins another one
            for member in self.members:
                await member.replica.aclose()

    def join(self, replica: Replica) -> Member:
        """Add a replica, which is polled from now on. It is used when a poll has found that it serves."""
        member = Member(replica)
        self.members.append(member)
        self._start_polling(member)
        logger.info("replica %s joins", member.name)
        return member

    async def leave(self, member: Member) -> None:
        """Remove a replica that no request runs on."""
        self.members.remove(member)
        await _cancel(self._polling.pop(member.name))
        await self.sharing.stop(member.name)
        if (checking := self._checks.get(member.name)) is not None:
            await checking  # a request that was lost on it may wait for this
        await member.replica.aclose()
        logger.info("replica %s has left", member.name)

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

    def _start_polling(self, member: Member) -> None:
        self._polling[member.name] = asyncio.create_task(self._poll(member))

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
            self.joining.read(member, health)
            member.change(*self._judge(member, health, models))
        if member.state is not before:
            level = logging.INFO if member.serves else logging.WARNING
            logger.log(level, "replica %s is %s%s", member.name, member.state, member.detail and f": {member.detail}")

    def _miss(self, member: Member, why: str) -> None:
        member.missed += 1
        if member.missed >= MAX_MISSED or member.state in (State.UNKNOWN, State.LOST):
            member.change(State.LOST, f"it does not answer: {why}")

    def _judge(self, member: Member, health: WholeAnswer, models: WholeAnswer) -> tuple[State, str]:
        if health.status != HTTPStatus.OK:
            return State.UNHEALTHY, _message(health)
        if models.status == HTTPStatus.FORBIDDEN:
            return State.REFUSED, _message(models)  # it does not know the name by which it is addressed
        if models.status == HTTPStatus.OK and not self._settings.allow_open:
            return State.REFUSED, OPEN
        if not member.is_admitted:
            is_waiting = member.state in (State.JOINING, State.OUTDATED)
            return (member.state, member.detail) if is_waiting else (State.JOINING, "its weights are compared")
        return State.SERVING, ""


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log why work failed whose caller was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("work went on without its caller, and failed: %s", error)


def _message(answer: WholeAnswer) -> str:
    """Return the message of an error, or its status."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(answer.body)["error"]["message"])
    return f"status {answer.status}"
