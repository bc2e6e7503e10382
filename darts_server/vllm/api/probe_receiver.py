"""Receives the hidden states that workers send to the API process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.engine.port import HiddenState, Probe
from darts_server.vllm.engine_core.probe_capture import INSTALL, READY, STATES, unpack_states

logger = logging.getLogger(__name__)

READY_SECONDS = 10.0
"""A worker answers within milliseconds, or never: it may run on another host, which this socket does not reach."""
LINGER_SECONDS = 5.0  # the last states of a candidate can arrive after its end, by less than the duration of a step


class ProbeReceiver:
    """Passes received states on to the probes of candidates.

    Messages are received, and `Probe.on_state` is called, in the event loop. A candidate is removed after its last
    state or some seconds after its end.
    """

    def __init__(self) -> None:
        self.fault: str | None = "no probe was installed"  # why no states are received; ``None`` if they are
        self._width: int | None = None
        self._probes: dict[int, Probe] = {}
        self._last_number = 0
        self._ready: asyncio.Queue[str | None] = asyncio.Queue()

    @property
    def width(self) -> int | None:
        """Width of the states; ``None`` unless every engine sends them."""
        return self._width if self.fault is None else None

    def register(self, probe: Probe) -> int:
        """Register a candidate's probe; return the number to start the candidate with."""
        self._last_number += 1
        self._probes[self._last_number] = probe
        return self._last_number

    def unregister(self, number: int) -> None:
        """Remove the probe of a candidate that has ended or was not started, after the linger time."""
        if number in self._probes:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._probes.pop, number, None)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Handle a message of a worker, or report no width any more if that fails."""
        kind, *rest = frames
        try:
            if kind == STATES:
                for number, tokens, state in unpack_states(*rest):
                    if (probe := self._probes.get(number)) is None:
                        continue
                    # In its own turn of the loop: an exception of one probe does not skip the others of this message.
                    asyncio.get_running_loop().call_soon(probe.on_state, HiddenState(tokens, state))
                    if tokens >= probe.detect_at[-1]:
                        del self._probes[number]
            elif kind == READY:
                self._width = int(rest[0])
                self._ready.put_nowait(None)
            else:
                self.disable(rest[0].decode())
                self._ready.put_nowait(self.fault)
        except Exception as error:
            self.disable(f"a worker's message cannot be read: {type(error).__name__}: {error}")

    async def wait_ready(self, engines: int) -> None:
        """Wait until every engine has announced states, or one has reported a fault."""
        answered = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while answered < engines:
                    if await self._ready.get() is not None:
                        return
                    answered += 1
        if answered == engines:
            self.fault = None
        else:
            self.disable(f"{answered} of {engines} engines have answered within {READY_SECONDS:.0f} s")

    def disable(self, reason: str) -> None:
        """Report no width from now on, so that no probe is registered any more."""
        if reason != self.fault:
            logger.warning("hidden states of candidates are not received: %s", reason)
        self.fault = reason


@asynccontextmanager
async def probing(llm: AsyncLLM) -> AsyncIterator[ProbeReceiver]:
    """Install the probe in this engine's workers. If that fails, the receiver's ``fault`` says why."""
    probes = ProbeReceiver()

    async def receive_all() -> None:
        while True:
            probes.receive(await socket.recv_multipart())
            await asyncio.sleep(0)  # receiving from a queue that is not empty does not yield to the loop

    with (
        TemporaryDirectory(prefix="darts-probe-", ignore_cleanup_errors=True) as folder,
        zmq.asyncio.Context() as context,
        context.socket(zmq.PULL) as socket,
    ):
        receiving = asyncio.create_task(receive_all())
        try:
            try:
                socket.setsockopt(zmq.RCVHWM, 0)
                address = f"ipc://{folder}/states"
                socket.bind(address)
                if hasattr(llm.engine_core, "install_probes"):  # engines elsewhere, whose hosts hand hidden states on
                    answers = await llm.engine_core.install_probes(probes.receive)
                else:
                    answers = await llm.collective_rpc(INSTALL, args=(address,))
            except Exception as error:
                probes.disable(f"{type(error).__name__}: {error}")
            else:
                if faults := [fault for fault in answers if fault is not None]:
                    probes.disable(faults[0])
                else:
                    await probes.wait_ready(len(llm.engine_core.core_engines))
            yield probes
        finally:
            receiving.cancel()
