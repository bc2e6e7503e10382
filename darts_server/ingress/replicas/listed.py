"""Servers that come and go: the replicas of an ingress are those of a list that somebody else keeps."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Replica

logger = logging.getLogger(__name__)

ListServers = Callable[[], Awaitable[Sequence[str]]]
"""Returns the addresses of all servers that there are now."""


class ListedServers:
    """The members of a fleet that stand in a list."""

    def __init__(self, fleet: Fleet, list_servers: ListServers, create: Callable[[str], Replica]) -> None:
        self._fleet = fleet
        self._list = list_servers
        self._create = create
        self._members: dict[str, Member] = {}

    async def update(self) -> None:
        """Let servers join that are new in the list, and those leave that are gone from it.

        A server that answers is used even if it is not in the list: whoever keeps that may have been restarted.
        """
        addresses = await self._list()
        new = [address for address in addresses if address not in self._members]
        for address in new:
            self._members[address] = self._fleet.join(self._create(address))
        await asyncio.gather(*(self._fleet.check(self._members[address]) for address in new))
        for address in set(self._members).difference(addresses):
            member = self._members[address]
            if not member.serves and not member.in_flight:
                del self._members[address]
                await self._fleet.leave(member)

    async def follow(self, interval: float) -> None:
        """Update again and again. ``interval``: seconds."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.update()
            except Exception as error:  # the servers that are known stay
                logger.warning("the list of servers cannot be read, it is tried again: %r", error)


@asynccontextmanager
async def following(
    fleet: Fleet, list_servers: ListServers, create: Callable[[str], Replica], interval: float
) -> AsyncIterator[None]:
    """Let servers join and leave a fleet in this block. ``create``: a replica at an address."""
    servers = ListedServers(fleet, list_servers, create)
    await servers.update()
    await fleet.joining.admit()  # otherwise the first requests would find no server
    task = asyncio.create_task(servers.follow(interval))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
