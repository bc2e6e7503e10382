"""The deployment whose replicas run one server each."""

import asyncio
import logging
import uuid
from contextlib import suppress
from typing import Any

from darts_server.ray.process import ServerEnded, ServerProcess, start_server
from darts_server.ray.settings import ServerSpec
from darts_server.serving.lifecycle import END_SECONDS

logger = logging.getLogger("ray.serve")

ANNOUNCE_SECONDS = 2.0
STOP_SECONDS = END_SECONDS
"""For a server to end after its running requests have ended, or were cut off."""


class Server:
    """A replica: it starts a server, and ends with it.

    Requests reach the server over HTTP, and not through this object. ``directory``: the handle of the `Directory`.
    """

    _process: ServerProcess | None = None
    _announcing: asyncio.Task[None] | None = None
    _watching: asyncio.Task[None] | None = None

    async def __init__(self, spec: ServerSpec, directory: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._directory = directory
        self._grace = spec.grace
        self._name = uuid.uuid4().hex
        self._number: int | None = None
        self._url: str | None = None
        await self._announce()
        assert self._number is not None
        self._process = start_server(spec.arguments_of(self._number), spec.host or _node_address(), spec.child)
        self._announcing = asyncio.create_task(self._announce_until_the_end(self._process))
        try:
            await self._process.wait_until_healthy()
        except BaseException:
            await self.stop()
            raise
        self._url = self._process.url
        self._watching = asyncio.create_task(self._process.watch())

    def check_health(self) -> None:
        """Ray Serve calls it, and replaces a replica that raises.

        Raises:
            ServerEnded
        """
        if self._process is not None:
            self._process.check_running()
            self._process.check_answering()

    async def stop(self) -> None:
        """Stop the server in order."""
        for task in (self._announcing, self._watching):
            if task is not None:
                task.cancel()
        if self._process is not None:
            await self._process.stop(self._grace + STOP_SECONDS)
        with suppress(Exception):  # the directory may be gone already; what is not renewed expires
            await self._directory.leave.remote(self._name)

    async def _announce_until_the_end(self, process: ServerProcess) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_SECONDS)
            try:
                process.check_running()
                await self._announce()
            except ServerEnded:
                await self._directory.leave.remote(self._name)
                return
            except Exception as error:  # the directory is being restarted
                logger.warning("this replica could not be announced: %s", error)

    async def _announce(self) -> None:
        self._number = await self._directory.announce.remote(self._name, self._url, self._number)


class ServerReplica(Server):
    """The class of the deployment."""

    async def __del__(self) -> None:
        """Ray Serve awaits this before it ends a replica."""
        await self.stop()


def _node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
