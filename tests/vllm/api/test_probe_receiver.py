import asyncio
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from darts_server.engine.port import HiddenState, Probe
from darts_server.vllm.api import probe_receiver as receiver
from darts_server.vllm.api.probe_receiver import ProbeReceiver, install_probes
from darts_server.vllm.engine_core.probe_capture import FAULT, READY, STATES, pack_states

pytestmark = pytest.mark.anyio


def states(*pairs: tuple[int, int]) -> list[bytes]:
    """Create a message from pairs of number and tokens. Each state is filled with its number."""
    rows = np.array([[number] * 3 for number, _ in pairs], dtype=np.float32)
    return pack_states([number for number, _ in pairs], [tokens for _, tokens in pairs], rows)


async def test_each_probe_gets_its_states_and_is_removed_after_its_last_point() -> None:
    probes = ProbeReceiver()
    two_points: list[HiddenState] = []
    one_point: list[HiddenState] = []
    first = probes.register(Probe((4, 9), two_points.append))
    second = probes.register(Probe((4,), one_point.append))
    probes.receive(states((first, 4), (second, 4)))
    probes.receive(states((first, 11), (second, 11), (77, 3)))
    await asyncio.sleep(0)
    assert [state.tokens for state in two_points] == [4, 11]
    assert [state.tokens for state in one_point] == [4]
    assert [state.vector.tolist() for state in two_points] == [[first] * 3] * 2
    assert two_points[0].vector.dtype == np.float32
    assert not probes._probes


async def test_an_exception_of_one_probe_does_not_skip_others() -> None:
    def fails(_: HiddenState) -> None:
        raise RuntimeError("no")

    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    probes = ProbeReceiver()
    received: list[HiddenState] = []
    numbers = [probes.register(Probe((1,), fails)), probes.register(Probe((1,), received.append))]
    probes.receive(states(*((number, 1) for number in numbers)))
    await asyncio.sleep(0)
    assert len(received) == 1
    assert [str(fault) for fault in faults] == ["no"]


async def test_states_are_passed_on_for_some_time_after_a_candidate_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "LINGER_SECONDS", 0.05)
    probes = ProbeReceiver()
    received: list[HiddenState] = []
    number = probes.register(Probe((4, 9), received.append))
    probes.unregister(number)
    probes.receive(states((number, 4)))
    await asyncio.sleep(0)
    assert [state.tokens for state in received] == [4]
    async with asyncio.timeout(10):
        while probes._probes:
            await asyncio.sleep(0.01)
    probes.receive(states((number, 9)))
    await asyncio.sleep(0)
    assert len(received) == 1


async def test_the_width_is_known_once_every_engine_is_ready_until_an_engine_reports_a_fault() -> None:
    probes = ProbeReceiver()
    assert probes.fault == "no probe was installed"
    waiting = asyncio.create_task(probes.wait_until_ready(2))
    probes.receive([READY, b"64"])
    await asyncio.sleep(0)
    assert probes.width is None
    probes.receive([READY, b"64"])
    await waiting
    assert probes.width == 64
    probes.receive([FAULT, b"RuntimeError: out of memory"])
    assert probes.fault == "RuntimeError: out of memory"


async def test_an_engine_that_does_not_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "READY_SECONDS", 0.05)
    probes = ProbeReceiver()
    probes.receive([READY, b"64"])
    await probes.wait_until_ready(2)
    assert probes.width is None
    assert (probes.fault or "").startswith("1 of 2 engines have answered")


class FakeLLM:
    """An engine whose worker sends ``frames`` when the probe is installed, and returns ``answer``."""

    def __init__(self, answer: str | None, *frames: list[bytes]) -> None:
        self.engine_core = self
        self.core_engines = [b"0"]
        self._answer = answer
        self._frames = frames

    async def collective_rpc(self, method: str, args: tuple[str]) -> list[str | None]:
        assert method == "darts_install_probe"
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(args[0])
            for frames in self._frames:
                await socket.send_multipart(frames)
        return [self._answer]


# The fake has only the attributes of an `AsyncLLM` that are used.
fake_llm: Any = FakeLLM


async def test_states_that_a_worker_sends_are_received() -> None:
    received: list[HiddenState] = []
    async with install_probes(fake_llm(None, [READY, b"3"], states((1, 5)))) as probes:
        assert probes.width == 3
        assert probes.register(Probe((5,), received.append)) == 1
        async with asyncio.timeout(10):
            while not received:
                await asyncio.sleep(0.01)
    assert received[0].vector.tolist() == [1, 1, 1]


async def test_the_reason_of_a_failed_installation_is_the_fault() -> None:
    async with install_probes(fake_llm("ValueError: a pooling model generates nothing")) as probes:
        assert (probes.width, probes.fault) == (None, "ValueError: a pooling model generates nothing")


async def test_a_message_that_cannot_be_read_is_a_fault() -> None:
    async with install_probes(fake_llm(None, [READY, b"3"], [STATES, b"?", b"?"])) as probes:
        async with asyncio.timeout(10):
            while probes.fault is None:
                await asyncio.sleep(0.01)
    assert "cannot be read" in (probes.fault or "")
