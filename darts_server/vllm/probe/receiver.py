"""What the API process asks of its workers, and hears from them."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import zmq
import zmq.asyncio
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.engine.port import Probe, Probed
from darts_server.vllm.probe import wire

logger = logging.getLogger(__name__)

READY_SECONDS = 10.0
"""A worker answers within milliseconds, or not at all: it may run on another host."""
LATE_SECONDS = 5.0
"""After a candidate's end its last states may still be on their way. A step takes less."""


class ProbeReceiver:
    """Who asked, and who is to be told.

    Messages are heard, and `Probe.tell` called, in the event loop. A candidate is forgotten when all was told, or some
    seconds after its end.

    Args:
        late: seconds after a candidate's end within which states of it are still told.
        patience: seconds within which engines must answer.
    """

    def __init__(self, late: float = LATE_SECONDS, patience: float = READY_SECONDS) -> None:
        self.fault: str | None = "no probe was installed"
        """Why no states are told; ``None`` if they are."""
        self.runner: str | None = None
        """Which of vLLM's model runners the workers have: ``first`` or ``second``."""
        self._late, self._patience = late, patience
        self._width: int | None = None
        self._asked: dict[int, Probe] = {}
        self._next = 0
        self._ready: asyncio.Queue[str | None] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def width(self) -> int | None:
        """Of the states; ``None`` unless every engine tells them."""
        return self._width if self.fault is None else None

    def register(self, probe: Probe) -> int:
        """The number of the candidate that is to be watched."""
        self._next += 1
        self._asked[self._next] = probe
        return self._next

    def unregister(self, number: int) -> None:
        """The candidate of this number has ended, or was never started."""
        if number in self._asked:
            asyncio.get_running_loop().call_later(self._late, self._asked.pop, number, None)

    def receive(self, frames: Sequence[bytes]) -> None:
        """A message of a worker."""
        kind, *rest = frames
        if kind == wire.STATES:
            for number, tokens, state in wire.unpack_states(*rest):
                self._tell(number, Probed(tokens, state))
        elif kind == wire.READY:
            self._width, self.runner = int(rest[0]), rest[1].decode()
            self._ready.put_nowait(None)
        else:
            self.disable(rest[0].decode())
            self._ready.put_nowait(self.fault)

    async def wait_ready(self, engines: int) -> None:
        """Wait until each engine has said that it will tell states, or that it cannot."""
        answered = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while answered < engines:
                    if await self._ready.get() is not None:
                        return
                    answered += 1
        if answered == engines:
            self.fault = None
        else:
            self.disable(f"{answered} of {engines} engines have answered within {self._patience:.0f} s")

    def disable(self, why: str) -> None:
        """Nothing is told from now on."""
        if why != self.fault:
            logger.warning("hidden states of candidates are not told: %s", why)
        self.fault = why

    def _tell(self, number: int, probed: Probed) -> None:
        if (probe := self._asked.get(number)) is None:
            return
        # A turn of its own, so that one listener's fault does not keep the others from hearing.
        asyncio.get_running_loop().call_soon(probe.tell, probed)
        if probed.tokens >= probe.detect_at[-1]:
            del self._asked[number]


@asynccontextmanager
async def probing(llm: AsyncLLM) -> AsyncIterator[ProbeReceiver]:
    """The probe in this engine's workers, until the block ends. One that could not be installed says why."""
    probes = ProbeReceiver()
    folder = Path(tempfile.mkdtemp(prefix="darts-probe-"))
    context = zmq.asyncio.Context()
    listening: asyncio.Task[None] | None = None
    try:
        try:
            socket = context.socket(zmq.PULL)
            socket.setsockopt(zmq.RCVHWM, 0)
            address = f"ipc://{folder / 'states'}"
            socket.bind(address)
            listening = asyncio.create_task(_listen(socket, probes))
            said = await llm.collective_rpc("darts_install_probe", args=(address,))
        except Exception as error:
            probes.disable(f"{type(error).__name__}: {error}")
        else:
            await _settle(llm, probes, said)
        yield probes
    finally:
        if listening is not None:
            listening.cancel()
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)


async def _settle(llm: AsyncLLM, probes: ProbeReceiver, said: Sequence[str | None]) -> None:
    # Of several data-parallel engines only the first one's answer comes back, but each sends word.
    if wrong := [why for why in said if why is not None]:
        probes.disable(wrong[0])
    else:
        await probes.wait_ready(len(llm.engine_core.core_engines))


async def _listen(socket: zmq.asyncio.Socket, probes: ProbeReceiver) -> None:
    while True:
        frames = await socket.recv_multipart()
        try:
            probes.receive(frames)
        except Exception as error:
            probes.disable(f"a worker was not understood: {type(error).__name__}: {error}")
        await asyncio.sleep(0)  # a queue that is not empty does not make its reader wait
