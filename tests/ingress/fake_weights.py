"""Weights of small servers, which are staged and switched as a darts-server does it."""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.ingress.servers import FakeServer

PATH = "/darts/v1/weights"
STAGED = f"{PATH}/staged"
REFUSAL = {"error": {"message": "too large"}}


@dataclass
class FakeWeights:
    """Stages weights and switches as a server does. ``refuses``: what: ``stage``, ``switch``, ``back``, ``keep``.

    With ``cut`` it cuts the connection of a switch and goes on with it, when ``cut`` is set.
    """

    server: FakeServer
    served: bytes = b"old"
    version: int = 3
    staged: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    previous: set[str] = field(default_factory=set)
    refuses: str = ""
    cut: asyncio.Event | None = None
    number: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    stage_gate: asyncio.Event = field(default_factory=asyncio.Event)
    read_gate: asyncio.Event = field(default_factory=asyncio.Event)
    start: str = ""
    """Named by its health, if it is not empty."""
    is_initial: bool = False
    loras: str = "none"

    def install(self) -> None:
        self.gate.set()
        self.stage_gate.set()
        self.read_gate.set()
        self.server.health_headers = self.header
        self.server.on("GET", f"{PATH}/tensors", self.read)
        self.server.on("PUT", PATH, self.stage)
        self.server.on("POST", PATH, self.stage)
        self.add_routes()

    def header(self) -> dict[str, str]:
        if not self.start:
            return {}
        source = "start" if self.is_initial else "update"
        return {"X-Darts-Weights": f"start={self.start}; version={self.version}; source={source}; loras={self.loras}"}

    def restart(self, start: str) -> None:
        """Serve the weights of a start."""
        self.start, self.served, self.version, self.is_initial, self.loras = start, b"initial", 0, True, "none"
        self.staged.clear()

    async def read(self, request: Request) -> Response:
        if self.refuses == "read":
            return JSONResponse({"error": {"message": "in no file"}}, 409)
        version = self.version
        await self.read_gate.wait()
        return Response(self.served, headers={"X-Darts-Weight-Version": str(version)})

    async def stage(self, request: Request) -> Response:
        body = await request.body()
        await self.stage_gate.wait()
        if self.refuses == "stage":
            return JSONResponse(REFUSAL, 413)
        if self.server.retry_after:
            return JSONResponse({"error": {"message": "stopping"}}, 503)
        if self.staged.keys() - self.previous:
            return JSONResponse({"error": {"message": "weights are staged already"}}, 409)
        assert request.query_params.get("stage") == "true" or (await request.json())["stage"]
        return self.answer(self.keep(body, int(request.query_params.get("version", self.version + 1))))

    def keep(self, weights: bytes, version: int) -> str:
        self.number += 1
        name = f"{self.server.name}{self.number}"
        self.staged[name] = weights, version
        self.add_routes()
        return name

    def add_routes(self) -> None:
        for name in list(self.staged):
            self.server.on("POST", f"{STAGED}/{name}:switch", self.switch)
            self.server.on("DELETE", f"{STAGED}/{name}", self.drop)

    async def switch(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2].removesuffix(":switch")
        is_back, keeps = name in self.previous, "keep_previous" in request.query_params
        await self.gate.wait()
        if self.refuses == ("back" if is_back else "switch"):
            return JSONResponse({"error": {"message": f"no {self.refuses}"}}, 503)
        if keeps and self.refuses == "keep":
            return JSONResponse({"error": {"message": "in no file", "param": "keep_previous"}}, 409)
        weights, version = self.staged.pop(name)
        if self.cut is not None:
            self.server.abort_connections()
            await self.cut.wait()
        before = self.served, self.version
        self.served, self.version = weights, int(request.query_params.get("version", version))
        self.is_initial = False
        if not keeps:
            return self.answer(None)
        kept = self.keep(*before)
        self.previous.add(kept)
        return self.answer(kept)

    async def drop(self, request: Request) -> Response:
        if self.staged.pop(request.url.path.rpartition("/")[2], None) is None:
            return JSONResponse({"error": {"message": "they are being switched, or were"}}, 409)
        return self.answer(None)

    def answer(self, name: str | None) -> Response:
        staged = None if name is None else {"id": name, "version": self.staged[name][1]}
        return JSONResponse({"version": self.version, "staged": staged})


def install(servers: list[FakeServer]) -> list[FakeWeights]:
    found = [FakeWeights(server) for server in servers]
    for each in found:
        each.install()
    return found


def state(weights: list[FakeWeights]) -> list[tuple[bytes, int]]:
    assert not any(each.staged for each in weights), "nothing stays staged"
    return [(each.served, each.version) for each in weights]
