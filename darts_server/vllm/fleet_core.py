"""vLLM's client of engines that are elsewhere, and come and go: each is a data-parallel rank to everything above it.

vLLM's own client of several engines starts them, or shares sockets with them, and ends with the first that dies. This
one has a connection to the host of each (`darts_server.vllm.engine_host`), which hands messages on as they are.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.exceptions import EngineBusy, EngineDead
from darts_server.fleet.transport import Connection, Hello, Receiver
from darts_server.serving.admission import RETRY_SECONDS

logger = logging.getLogger(__name__)


class FleetCore(AsyncMPClient):
    """Stands in the place of vLLM's client.

    Args:
        config: of every engine; vLLM's, with ``data_parallel_size`` the number of engines.
        on_joined: brings an engine that has come (back) to the state of the others, before it gets requests.
    """

    def __init__(self, config: VllmConfig, on_joined: Callable[[bytes], Awaitable[None]]) -> None:
        # Not vLLM's own: that starts engines.
        self.vllm_config = config
        self.resources: Any = SimpleNamespace(engine_dead=False, engine_manager=None)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self.utility_results: dict[int, Any] = {}
        self.client_index, self.client_count, self.engines_running = 0, 1, False
        self.engine_ranks_managed = list(range(config.parallel_config.data_parallel_size))
        self.core_engines: list[bytes] = []
        """Those that get requests and calls."""
        self._effective_attention_block_sizes: set[int | None] = set()
        self._kv_event_sources: dict[int, Any] = {}
        self.stats_update_address = None
        self._on_joined = on_joined
        self._engines: dict[bytes, Engine] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._seen: set[int] = set()
        self._change = asyncio.Event()

    # --- engines come and go ----------------------------------------------------

    def joined(self, hello: Hello, connection: Connection) -> Receiver:
        """Take an engine that has connected. It gets requests once it has what the others have."""
        if hello.rank not in self.engine_ranks_managed:
            raise ValueError(f"rank {hello.rank} of an engine, of {len(self.engine_ranks_managed)}")
        name = hello.rank.to_bytes(2, "little")
        if (before := self._engines.get(name)) is not None:
            before.connection.close("another one has come in its place")
        if hello.rank not in self._seen:  # vLLM adds its KV blocks to those of the others
            self._seen.add(hello.rank)
            self._apply_ready_response(hello.ready)
        engine = self._engines[name] = Engine(self, name, connection)
        task = asyncio.get_running_loop().create_task(self._join(engine))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)
        return engine

    async def _join(self, engine: "Engine") -> None:
        try:
            await self._on_joined(engine.name)
        except Exception as error:
            logger.exception("engine %d cannot be brought to the state of the others", engine.rank)
            engine.connection.close(f"it has not the state of the others: {error}")
            return
        if self._engines.get(engine.name) is engine:
            self.core_engines = sorted([*self.core_engines, engine.name])
            self._change.set()

    async def wait_for_all(self) -> None:
        """Wait until every engine has come."""
        while len(self.core_engines) < len(self.engine_ranks_managed):
            self._change.clear()
            await self._change.wait()

    def lose(self, engine: "Engine", reason: str) -> None:
        """End what an engine was running as if it had aborted it: groups start other candidates."""
        if self._engines.get(engine.name) is not engine:
            return
        del self._engines[engine.name]
        self.core_engines = [name for name in self.core_engines if name != engine.name]
        logger.error("engine %d is lost with %d requests: %s", engine.rank, len(engine.requests), reason)
        for call in engine.calls:
            if (future := self.utility_results.pop(call, None)) is not None and not future.done():
                future.set_exception(EngineDead(f"engine {engine.rank} was lost: {reason}"))
        outputs = [EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT) for name in engine.requests]
        if outputs:
            self.outputs_queue.put_nowait(EngineCoreOutputs(engine_index=engine.rank, outputs=outputs))

    @property
    def core_engine(self) -> bytes:  # type: ignore[override]
        """Any of them, for vLLM's calls of one."""
        if not self.core_engines:
            raise EngineBusy("no engine is up; they are started again", RETRY_SECONDS)
        return self.core_engines[0]

    # --- in place of vLLM's ------------------------------------------------------

    def _ensure_output_queue_task(self) -> None:
        """Outputs come by the connections."""

    async def _send_input_message(self, message: Sequence[Any], engine: bytes) -> None:  # type: ignore[override]
        self.ensure_alive()
        if (there := self._engines.get(engine)) is None:
            raise EngineDead(f"engine {int.from_bytes(engine, 'little')} was lost")
        there.connection.send(message)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        wanted = request.data_parallel_rank
        name = None if wanted is None else wanted.to_bytes(2, "little")
        if name not in self.core_engines:
            name = min(self.core_engines, key=lambda each: len(self._engines[each].requests), default=self.core_engine)
        request.client_index, request.data_parallel_rank = self.client_index, None
        self._engines[name].requests[request.request_id] = None
        await super()._send_input(EngineCoreRequestType.ADD, request, name)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name, engine in list(self._engines.items()):
            if here := [each for each in request_ids if each in engine.requests]:
                await super()._send_input(EngineCoreRequestType.ABORT, here, name)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call all engines; the result of one, or where they differ what says most."""
        _ = self.core_engine
        calls = (self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines)
        results = await asyncio.gather(*calls)
        if method == "collective_rpc":
            return [each for result in results for each in result]
        return all(results) if all(isinstance(each, bool) for each in results) else results[0]

    def shutdown(self, timeout: float | None = None) -> None:
        for engine in list(self._engines.values()):
            engine.connection.close("the coordinator stops")
        for task in self._joining:
            task.cancel()


class Engine:
    """One engine, in one of its lives."""

    def __init__(self, core: FleetCore, name: bytes, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.rank = int.from_bytes(name, "little")
        self.requests: dict[str, None] = {}
        self.calls: Counter[int] = Counter()
        self._core = core

    def received(self, parts: list[bytes]) -> None:
        if parts[0] == EngineCoreProc.ENGINE_CORE_DEAD:
            self.connection.close("it has died")
            return
        outputs: EngineCoreOutputs = self._core.decoder.decode(parts)
        outputs.engine_index = self.rank
        if outputs.utility_output is not None:
            if outputs.utility_output.call_id in self._core.utility_results:
                _process_utility_output(outputs.utility_output, self._core.utility_results)
            return
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.requests.pop(output.request_id, None)
        if outputs.outputs or outputs.scheduler_stats:
            self._core.outputs_queue.put_nowait(outputs)

    def lost(self, reason: str) -> None:
        self._core.lose(self, reason)
