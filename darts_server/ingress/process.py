"""The life of an ingress's process: poll, serve, stop."""

import asyncio
import logging
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from darts_server.exceptions import ServerStopping
from darts_server.http.security.access import is_loopback
from darts_server.ingress.app import Ingress
from darts_server.ingress.replicas.fleet import Fleet, PollSettings
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.listed import ListServers, following
from darts_server.ingress.replicas.replica import Replica
from darts_server.ingress.settings import IngressSettings
from darts_server.serving.lifecycle import RETRY_SECONDS, Lifecycle

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(settings: IngressSettings, list_servers: ListServers | None = None) -> None:
    """Serve until a signal. The first one stops accepting, and waits for running requests; the second one does not.

    An update of weights that has begun is finished in any case. ``list_servers``: for servers that come and go, in
    addition to those of the settings.
    """
    raise_file_limit()
    async with AsyncExitStack() as stack:
        fleet = make_fleet(settings, [HttpReplica(url) for url in settings.server_list])
        await stack.enter_async_context(fleet.polled())
        if list_servers is not None:
            await stack.enter_async_context(following(fleet, list_servers, HttpReplica, settings.poll_interval))
        lifecycle = Lifecycle()
        await _Server(make_app(fleet, settings, lifecycle), settings, lifecycle).serve()


def raise_file_limit() -> None:
    """Allow as many open files as this process may have: each request has two connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_fleet(settings: IngressSettings, replicas: Sequence[Replica]) -> Fleet:
    """Create the replicas' fleet.

    Servers without keys are used by an ingress that other machines can reach only if that is allowed.
    """
    allow_open = settings.allow_unauthenticated or is_loopback(settings.host)
    return Fleet(replicas, PollSettings(settings.poll_interval, settings.poll_timeout, allow_open, settings.admin_key))


def make_app(fleet: Fleet, settings: IngressSettings, lifecycle: Lifecycle) -> ASGIApp:
    """Create the app of an ingress."""
    app: ASGIApp = Ingress(fleet, settings, lifecycle)
    if settings.allowed_origins:
        app = CORSMiddleware(app, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, settings: IngressSettings, lifecycle: Lifecycle) -> None:
        config = uvicorn.Config(
            app,
            settings.host,
            settings.port,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a caller's address is that of its connection
            date_header=False,  # they are the replica's
            server_header=False,
            timeout_graceful_shutdown=settings.grace_seconds,
        )
        super().__init__(config)
        self._lifecycle = lifecycle

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop in order. uvicorn itself would end the process by the same signal afterwards."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._lifecycle.stop(ServerStopping("the ingress is stopping; send this to another one", RETRY_SECONDS))
        logger.info("the ingress is stopping")
