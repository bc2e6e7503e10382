"""Small servers in place of darts-servers, over real sockets, and an ingress in front of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from darts_server.ingress.process import make_app, make_fleet
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.http import HttpReplica
from darts_server.ingress.replicas.listed import following
from darts_server.ingress.settings import IngressSettings
from darts_server.serving.lifecycle import Lifecycle

Handler = Callable[[Request], Awaitable[Response]]
POLL_SECONDS = 0.05
OBSERVATIONS = "/darts/v1/observations"


@dataclass(frozen=True)
class Received:
    """A request that a server got."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeServer:
    """Answers every route with its name, but for those in ``handlers`` and in ``app``, whose paths have the prefix."""

    name: str = ""
    handlers: dict[tuple[str, str], Handler] = field(default_factory=dict)
    app: ASGIApp | None = None
    prefix: str = "/darts/v1"
    needs_key: bool = False
    health: int = 200
    retry_after: str = ""
    """Of its health."""
    health_headers: Callable[[], dict[str, str]] = dict
    models: int = 200
    shares: bool = False
    """Whether it has a route for observations. Otherwise the ingress asks for them once."""
    frozen: bool = False
    """Whether it accepts requests and answers none."""
    received: list[Received] = field(default_factory=list)
    url: str = ""
    killed: bool = False
    disconnects: int = 0
    running: int = 0
    _server: uvicorn.Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if self.killed:  # a connection that was being accepted
            self.abort_connections()
            return
        while self.frozen:
            await asyncio.sleep(0.01)
        if scope["path"] == "/health":
            headers = self.health_headers() | ({"Retry-After": self.retry_after} if self.retry_after else {})
            response: Response = JSONResponse({"error": {"message": "it is stopping"}}, self.health, headers)
        elif self.needs_key and "authorization" not in request.headers:
            response = JSONResponse({"error": {"message": "key?"}}, 401)
        elif scope["path"] == "/v1/models":
            response = JSONResponse({"error": {"message": "use its IP address"}}, self.models)
        elif scope["path"] == OBSERVATIONS and not self.shares:
            response = JSONResponse({"error": {"message": "not here"}}, 404)
        elif self.app is not None and scope["path"].startswith(self.prefix):
            await self._pass_on(self.app, request, send)
            return
        else:
            response = await self._handle(request)
        await response(scope, receive, send)

    async def _pass_on(self, app: ASGIApp, request: Request, send: Send) -> None:
        """Answer by an app."""
        messages = [await request.receive()]
        while messages[-1].get("more_body"):
            messages.append(await request.receive())
        self._record(request, b"".join(message.get("body", b"") for message in messages))

        async def receive() -> Message:
            return messages.pop(0) if messages else await request.receive()

        await app(request.scope, receive, send)

    def _record(self, request: Request, body: bytes) -> None:
        path = request.scope["raw_path"].decode()
        self.received.append(Received(request.method, path, request.url.query, dict(request.headers), body))

    async def _handle(self, request: Request) -> Response:
        self._record(request, await request.body())
        self.running += 1
        try:
            handler = self.handlers.get((request.method, request.url.path))
            return JSONResponse({"server": self.name}) if handler is None else await handler(request)
        finally:
            self.running -= 1

    def on(self, method: str, path: str, handler: Handler) -> None:
        self.handlers[method, path] = handler

    def answer(self, method: str, path: str, body: Any, status: int = 200) -> None:
        """Answer a route always with that."""

        async def handle(_: Request) -> Response:
            return JSONResponse(body, status)

        self.on(method, path, handle)

    def bodies(self, path: str) -> list[Any]:
        """The bodies that a route got."""
        return [each.json for each in self.received if each.path == path]

    async def kill(self) -> None:
        """End as a process does that is killed: the port is closed, and connections are cut."""
        assert self._server is not None
        self.killed = True
        await stop_accepting(self._server)
        for server in self._server.servers:
            server.close()
        self.abort_connections()
        await asyncio.sleep(0)

    def abort_connections(self) -> None:
        """Cut all connections. The port stays open."""
        assert self._server is not None
        abort_connections(self._server)


def abort_connections(server: uvicorn.Server) -> None:
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def stop_accepting(server: uvicorn.Server) -> None:
    """Accept nothing any more, and have what was accepted attached.

    In Python 3.11 a connection whose server closes between the two is never closed.
    """
    for each in server.servers:
        for socket in each.sockets:
            asyncio.get_running_loop().remove_reader(socket.fileno())
    await asyncio.sleep(0)


@asynccontextmanager
async def listening(*apps: ASGIApp) -> AsyncIterator[list[uvicorn.Server]]:
    """Serve each app on a free port. They are shut down together, and do not wait for uvicorn's main loop to notice."""
    servers: list[uvicorn.Server] = []
    try:
        for app in apps:
            server = _server_of(app)
            await server.startup()
            servers.append(server)
            await server.on_tick(0)  # sets the headers of answers
        yield servers
    finally:
        for server in servers:
            await stop_accepting(server)
        await asyncio.gather(*(server.shutdown() for server in servers))
        for _ in range(10):  # what was being accepted, or was cancelled while it connected, is closed in later turns
            for server in servers:
                abort_connections(server)
            await asyncio.sleep(0)


def _server_of(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        "127.0.0.1",
        0,
        lifespan="off",
        ws="none",
        loop="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


def port_of(server: uvicorn.Server) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1])


@asynccontextmanager
async def fake_servers(count: int) -> AsyncIterator[list[FakeServer]]:
    """Run servers that answer with their names: a, b, c and so on."""
    fakes = [FakeServer(chr(ord("a") + number)) for number in range(count)]
    async with listening(*fakes) as servers:
        for fake, server in zip(fakes, servers, strict=True):
            fake._server = server
            fake.url = f"http://127.0.0.1:{port_of(server)}"
        yield fakes


@dataclass
class RunningIngress:
    """``client``: sends requests to it."""

    client: httpx.AsyncClient
    fleet: Fleet
    lifecycle: Lifecycle
    url: str

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json={} if body is None else body, headers=named)


@asynccontextmanager
async def ingress(
    fakes: Sequence[FakeServer], listing: Callable[[], Awaitable[Sequence[str]]] | None = None, **settings: Any
) -> AsyncIterator[RunningIngress]:
    """Run an ingress in front of servers. ``listing``: it follows a list of servers."""
    given = {"server_list": [fake.url for fake in fakes], "poll_interval": POLL_SECONDS, "poll_timeout": 30.0}
    checked = IngressSettings(**{**given, **settings})
    lifecycle = Lifecycle()
    replicas = [HttpReplica(url) for url in checked.server_list]
    async with (
        make_fleet(checked, replicas).polled() as fleet,
        nullcontext() if listing is None else following(fleet, listing, HttpReplica, POLL_SECONDS),
        listening(make_app(fleet, checked, lifecycle)) as [server],
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}", timeout=60, verify=False) as client,
    ):
        yield RunningIngress(client, fleet, lifecycle, str(client.base_url))


@asynccontextmanager
async def ingress_over(count: int, **settings: Any) -> AsyncIterator[tuple[RunningIngress, list[FakeServer]]]:
    """Run so many servers, and an ingress in front of them."""
    async with fake_servers(count) as fakes, ingress(fakes, **settings) as running:
        yield running, fakes


def hang(server: FakeServer, path: str) -> None:
    """Let a server answer nothing until its caller disconnects."""

    async def handle(request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        server.disconnects += 1
        return Response()

    server.on("POST", path, handle)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
