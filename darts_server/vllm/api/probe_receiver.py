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
"""A worker answers within milliseconds, or never if it runs on another host."""
LINGER_SECONDS = 5.0
"""A candidate's last states may arrive one decode step after its end."""


class ProbeReceiver:
    def __init__(self) -> None:
        self.fault: str | None = "no probe was installed"
        """Why no states are received, or None if they are."""
        self._width: int | None = None
        self._probes: dict[int, Probe] = {}
        self._last_number = 0
        # The fault of each engine that has answered, or None.
        self._engine_reports: asyncio.Queue[str | None] = asyncio.Queue()

    @property
    def width(self) -> int | None:
        """Width of the states, or None unless every engine sends them."""
        return self._width if self.fault is None else None

    def register(self, probe: Probe) -> int:
        self._last_number += 1
        self._probes[self._last_number] = probe
        return self._last_number

    def unregister(self, number: int) -> None:
        # The last states may still be on their way.
        if number in self._probes:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._probes.pop, number, None)

    def receive(self, frames: Sequence[bytes]) -> None:
        """Handle a message of a worker. An unreadable message disables the receiver."""
        kind, *rest = frames
        try:
            if kind == STATES:
                for number, tokens, state in unpack_states(*rest):
                    probe = self._probes.get(number)
                    if probe is None:
                        continue
                    # An exception of one probe must not skip the other probes of this message.
                    asyncio.get_running_loop().call_soon(probe.on_state, HiddenState(tokens, state))
                    # This state was the last.
                    if tokens >= probe.detect_at[-1]:
                        del self._probes[number]
            elif kind == READY:
                self._width = int(rest[0])
                self._engine_reports.put_nowait(None)
            else:
                self.disable(rest[0].decode())
                self._engine_reports.put_nowait(self.fault)
        except Exception as error:
            self.disable(f"a worker's message cannot be read: {type(error).__name__}: {error}")

    async def wait_until_ready(self, engines: int) -> None:
        """Wait until every engine has announced states, or one engine has reported a fault, and set ``fault``."""
        ready_engines = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while ready_engines < engines:
                    # `receive` has set the fault.
                    if await self._engine_reports.get() is not None:
                        return
                    ready_engines += 1
        if ready_engines == engines:
            self.fault = None
        else:
            self.disable(f"{ready_engines} of {engines} engines have answered within {READY_SECONDS:.0f} s")

    def disable(self, reason: str) -> None:
        # With a fault `width` is None, so that no probes are registered.
        if reason != self.fault:
            logger.warning("hidden states of candidates are not received: %s", reason)
        self.fault = reason


@asynccontextmanager
async def install_probes(llm: AsyncLLM) -> AsyncIterator[ProbeReceiver]:
    """Install the probe in workers, and yield its receiver. If that fails, ``fault`` says why."""
    probes = ProbeReceiver()

    async def receive_all() -> None:
        while True:
            probes.receive(await socket.recv_multipart())
            # Receiving from a socket that is never empty does not yield to the event loop.
            await asyncio.sleep(0)

    with (
        TemporaryDirectory(prefix="darts-probe-", ignore_cleanup_errors=True) as folder,
        zmq.asyncio.Context() as context,
        context.socket(zmq.PULL) as socket,
    ):
        receiving = asyncio.create_task(receive_all())
        try:
            try:
                # No limit: a worker must not block because this process is slow.
                socket.setsockopt(zmq.RCVHWM, 0)
                address = f"ipc://{folder}/states"
                socket.bind(address)
                # The hosts of a fleet forward the states of their engines.
                if hasattr(llm.engine_core, "install_probes"):
                    answers = await llm.engine_core.install_probes(probes.receive)
                else:
                    answers = await llm.collective_rpc(INSTALL, args=(address,))
                fault = next((answer for answer in answers if answer is not None), None)
                if fault is None:
                    await probes.wait_until_ready(len(llm.engine_core.core_engines))
                else:
                    probes.disable(fault)
            except Exception as error:
                probes.disable(f"{type(error).__name__}: {error}")
            yield probes
        finally:
            receiving.cancel()
