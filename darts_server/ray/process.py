"""A darts-server as a child of this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from random import SystemRandom

from darts_server.ingress.replicas.fleet import HEALTH
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.replica import NoResources, ReplicaFailure
from darts_server.ingress.replicas.whole import fetch

PORTS, MAX_TRIES = range(20_000, 30_000), 100
"""The system gives these to no connection, so that a port stays free until the server binds it."""
POLL_SECONDS = 0.5
REQUEST_SECONDS = 10.0
WATCH_SECONDS = 2.0
MAX_UNANSWERED = 6
"""Health requests in a row without an answer, about a minute, after which a server counts as hung."""
HTTP_OK = 200


class ServerEnded(Exception):
    """The server has exited by itself, or hangs."""


class ServerProcess:
    """A server that was started. It ends with this process, however that ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.url = url
        self.pid = process.pid
        self._process = process
        self._unanswered = 0

    def check_running(self) -> None:
        """
        Raises:
            ServerEnded
        """
        if (code := self._process.poll()) is not None:
            self._kill_group()
            raise ServerEnded(f"the server of this replica has exited with code {code}; its log says why")

    def check_answering(self) -> None:
        """
        Raises:
            ServerEnded: it did not answer `watch` for long.
        """
        if self._unanswered >= MAX_UNANSWERED:
            raise ServerEnded(f"the server has not answered {self._unanswered} health requests in a row")

    async def watch(self) -> None:
        """Request the server's health until cancelled. Any status is an answer: it may be stopping, or be busy."""
        replica = HttpReplica(self.url)
        try:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                try:
                    async with asyncio.timeout(REQUEST_SECONDS):
                        await fetch(replica, HEALTH)
                except NoResources:
                    continue  # this process lacks them, which says nothing of the server
                except (ReplicaFailure, TimeoutError):
                    self._unanswered += 1
                else:
                    self._unanswered = 0
        finally:
            await replica.aclose()

    async def wait_until_healthy(self) -> None:
        """Wait until the server answers, which may take as long as its model takes to load.

        Raises:
            ServerEnded
        """
        replica = HttpReplica(self.url)
        try:
            while True:
                self.check_running()
                with suppress(ReplicaFailure, TimeoutError):
                    async with asyncio.timeout(REQUEST_SECONDS):
                        if (await fetch(replica, HEALTH)).status == HTTP_OK:
                            return
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await replica.aclose()

    async def wait(self) -> None:
        """Wait until the server has ended."""
        while self._process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self, seconds: float) -> None:
        """Stop the server in order: it ends what runs. After so many seconds it is killed."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self.wait()
        finally:
            self._kill_group()
            self._process.wait()

    def _kill_group(self) -> None:
        """Kill what is left of the server, such as processes of its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def start_server(arguments: Sequence[str], host: str, child: str) -> ServerProcess:
    """Start ``darts-server serve`` with these arguments, on a free port of an address of this machine.

    ``child``: the module that is run.
    """
    port = free_port(host)
    command = [
        sys.executable,
        "-m",
        child,
        str(os.getpid()),
        "serve",
        *arguments,
        "--host",
        host,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    return ServerProcess(process, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def free_port(host: str) -> int:
    """Return a port that is not in use."""
    for port in SystemRandom().sample(PORTS, MAX_TRIES):
        with suppress(OSError), socket.create_server((host, port), family=_family(host)):
            return port
    raise OSError(f"{MAX_TRIES} ports of {PORTS.start} to {PORTS.stop - 1} are taken")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
