"""The host of one engine: starts vLLM's engine for a coordinator on another node, and passes its messages on.

    python -m darts_server.vllm.fleet.host PID < start

``start`` is `Start` as JSON. The host ends with its engine, with its connection, and with the process PID.
"""

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import MPClient
from vllm.v1.executor import Executor

from darts_server.vllm import flags
from darts_server.vllm.engine_core.holding import RANK
from darts_server.vllm.engine_core.plugin import end_with_process
from darts_server.vllm.fleet.transport import HIDDEN_STATES, Connection, Hello, connect

logger = logging.getLogger(__name__)

PROCESS_POLL_SECONDS = 0.1


class Start(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of a host."""

    argv: list[str]
    host: str
    port: int
    token: str
    rank: int


class LocalEngine(MPClient):
    """vLLM's client of a local engine. It reads no messages of the engine, and passes the coordinator's on."""

    ready_message = b""
    disconnected: asyncio.Future[str]

    def _apply_ready_response(self, payload: bytes) -> None:
        # The coordinator's client of the engine applies the message too.
        self.ready_message = payload
        super()._apply_ready_response(payload)

    def message_received(self, parts: list[bytes]) -> None:
        self.input_socket.send_multipart([self.core_engine, *parts], copy=False)

    def connection_lost(self, reason: str) -> None:
        if not self.disconnected.done():
            self.disconnected.set_result(f"the connection to the coordinator has ended: {reason}")


async def run_host(start: Start, folder: Path) -> str:
    """Run an engine until it ends or the coordinator disconnects, and return the reason. ``folder``: for sockets."""
    os.environ[RANK] = str(start.rank)
    args = flags.parse(start.argv)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    # The coordinator sends images whole, so the engine needs no cache of them.
    flags.send_images_whole(config)
    engine = LocalEngine(
        asyncio_mode=True,
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=not args.disable_log_stats,
    )
    engine.disconnected = asyncio.get_running_loop().create_future()
    process_manager: Any = engine.resources.engine_manager
    output_socket: Any = engine.resources.output_socket
    connection: Connection | None = None
    tasks: list[asyncio.Future[Any]] = []

    async def pass_outputs(connection: Connection) -> str:
        while True:
            parts = await output_socket.recv_multipart()
            connection.send(parts)
            if parts[0] == EngineCoreProc.ENGINE_CORE_DEAD:
                return "the engine has died"

    async def pass_hidden_states(connection: Connection) -> str:
        while True:
            connection.send([HIDDEN_STATES, *await hidden_states.recv_multipart()])

    async def wait_for_process() -> str:
        # A process that was killed sends no message.
        while not process_manager.finished_procs():
            await asyncio.sleep(PROCESS_POLL_SECONDS)
        return f"the engine was ended: {process_manager.finished_procs()}"

    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as hidden_states:
        try:
            hidden_states.setsockopt(zmq.RCVHWM, 0)
            address = f"ipc://{folder / 'states'}"
            hidden_states.bind(address)

            # Connect to the coordinator, and pass messages until a task or the connection ends.
            hello = Hello(start.token, start.rank, engine.ready_message, address)
            connection = await connect(start.host, start.port, hello, engine)
            tasks = [
                asyncio.ensure_future(pass_outputs(connection)),
                asyncio.ensure_future(pass_hidden_states(connection)),
                asyncio.ensure_future(wait_for_process()),
                engine.disconnected,
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return str(done.pop().result())
        finally:
            for task in tasks:
                task.cancel()
            # Close the connection before the shutdown, which takes seconds: callers wait for the engine's requests. The
            # transport closes it in the next turn of the event loop.
            if connection is not None:
                connection.close("the engine has ended")
                await asyncio.sleep(0)
            engine.shutdown()


def main() -> int:
    """Run a host. Return 1, because a host ends only with a failure."""
    end_with_process(int(sys.argv[1]))
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Start)
    with tempfile.TemporaryDirectory(prefix="darts-engine-") as folder:
        reason = asyncio.run(run_host(start, Path(folder)))
    logger.error("engine %d ends: %s", start.rank, reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())
