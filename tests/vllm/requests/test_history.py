"""Each engine gets the answers of a prompt that it has not counted, with the first request of the prompt."""

import asyncio
from array import array
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.drafts.history import History
from darts_server.vllm.engine_core.drafter import HISTORY
from darts_server.vllm.requests import history as module
from darts_server.vllm.requests.history import RequestHistory
from tests.vllm.engine_core.test_holding import new_request

ADD = EngineCoreRequestType.ADD


class Core:
    """vLLM's client of two engines, which may start again."""

    def __init__(self) -> None:
        self.core_engines = [b"0", b"1"]
        self.core_engine = b"0"
        self.engines: dict[bytes, object] = {b"0": object(), b"1": object()}
        self.sent: list[tuple[EngineCoreRequestType, Any, bytes]] = []
        self.emptied: dict[bytes, list[int] | Exception] = {b"0": [0], b"1": [0]}

    def _send_input(self, request_type: EngineCoreRequestType, request: Any, engine: bytes | None = None) -> None:
        assert engine is not None
        self.sent.append((request_type, request, engine))

    async def _call_utility_async(self, *call: Any, engine: bytes) -> list[int]:
        assert call[:2] == ("collective_rpc", "darts_emptied_drafts")
        answer = self.emptied[engine]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Process:
    """The vLLM objects of the API process that send requests and end them."""

    def __init__(self) -> None:
        self.core: Any = Core()
        self.processor = OutputProcessor(None, log_stats=False)
        self.version = 0
        self.history = History(1 << 20, lambda *_: None)
        self.keeper = RequestHistory(self.core, self.processor, self.history, lambda: self.version)
        self.names = iter(range(1000))

    def add(self, engine: bytes | None = None, **changes: Any) -> str:
        """Send a request with the prompt of `new_request`, and return its id."""
        name = str(next(self.names))
        request = new_request(name)
        for field, value in changes.items():
            setattr(request, field, value)
        collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name)
        self.processor.add_request(request, None, None, 0, collector)
        self.core._send_input(ADD, request, engine)
        return name

    def end(self, name: str, *tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.processor.process_outputs([EngineCoreOutput(name, list(tokens), finish_reason=reason)])

    @property
    def got(self) -> list[tuple[int, list[int]]]:
        """Ages and tokens of the answers in the last request that was sent."""
        params = self.core.sent[-1][1].sampling_params
        answers = (params.extra_args or {}).get(HISTORY, [])
        return [(age, array("i", tokens).tolist()) for age, tokens in answers]


def test_an_engine_gets_the_answers_of_the_other_engine_once() -> None:
    process = Process()
    process.end(process.add(b"0"), 5, 6)
    process.end(process.add(b"1"), 7, reason=FinishReason.ABORT)
    assert process.got == [(0, [5, 6])]
    process.add(b"1")
    assert process.got == []
    # An engine that is not named is vLLM's first.
    process.add()
    assert process.core.sent[-1][2] == b"0"
    assert process.got == [(0, [7])]


def test_answers_age_and_other_adapters_have_others() -> None:
    process = Process()
    adapter = LoRARequest("a", 1, "/a")
    process.end(process.add(b"0"), 5)
    process.end(process.add(b"0", lora_request=adapter), 6)
    process.version = 1
    process.end(process.add(b"0"), 7)
    process.add(b"1")
    assert process.got == [(0, [7]), (1, [5])]
    process.add(b"1", lora_request=adapter)
    assert process.got == [(1, [6])]


def test_a_request_that_was_sent_keeps_its_own_parameters() -> None:
    process = Process()
    process.end(process.add(b"0"), 5)
    request = new_request("own", extra_args={"own": 1})
    before = request.sampling_params
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "own")
    process.processor.add_request(request, None, None, 0, collector)
    process.core._send_input(ADD, request, b"1")
    assert process.core.sent[-1][1].sampling_params.extra_args == {"own": 1, HISTORY: [(0, array("i", [5]).tobytes())]}
    assert request.sampling_params is before
    assert before is not None
    assert before.extra_args == {"own": 1}


def test_answers_reach_another_process_as_bytes() -> None:
    process = Process()
    process.end(process.add(b"0"), 5, 6)
    process.add(b"1")
    frames = MsgpackEncoder().encode(process.core.sent[-1][1])
    received = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert received.sampling_params.extra_args[HISTORY] == [[0, array("i", [5, 6]).tobytes()]]


def test_a_request_that_did_not_run_brought_nothing() -> None:
    process = Process()
    process.end(process.add(b"0"), 5)
    process.end(process.add(b"1"), reason=FinishReason.ABORT)
    name = process.add(b"1")
    assert process.got == [(0, [5])]
    process.end(process.add(b"1"), reason=FinishReason.ABORT)
    process.end(name, 6)
    process.add(b"1")
    assert process.got == []


def test_an_engine_that_started_again_gets_all_answers() -> None:
    process = Process()
    process.end(process.add(b"0"), 5)
    process.core.engines[b"0"] = object()
    process.add(b"0")
    assert process.got == [(0, [5])]


@pytest.mark.anyio
async def test_an_engine_that_has_emptied_its_counts_gets_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    process = Process()
    for engine in (b"0", b"1"):
        process.end(process.add(engine), *engine)
    process.core.emptied = {b"0": [1, 1], b"1": RuntimeError("it was lost")}
    watching = asyncio.create_task(process.keeper.watch_engines())
    await asyncio.sleep(0.05)
    process.add(b"0")
    assert process.got == [(0, [ord("1")]), (0, [ord("0")])]
    await asyncio.sleep(0.05)
    watching.cancel()
    process.add(b"0")
    assert process.got == []
    process.add(b"1")
    assert process.got == []


def test_prompts_without_tokens_and_other_messages_pass_as_they_are() -> None:
    process = Process()
    process.end(process.add(b"0"), 5)
    embeds = torch.zeros(3, 4)
    process.end(process.add(b"1", prompt_embeds=embeds), 6)
    assert process.got == []
    process.add(b"1", resumable=True)
    assert process.got == []
    process.core._send_input(EngineCoreRequestType.ABORT, ["0"])
    assert process.core.sent[-1] == (EngineCoreRequestType.ABORT, ["0"], b"0")
    # A request that ended without a token, and a request that nobody waits for.
    process.end(process.add(b"0"), reason=FinishReason.ABORT)
    process.core._send_input(ADD, new_request("unknown"), b"1")
    assert process.got == []
    assert process.history.prompts == 1
