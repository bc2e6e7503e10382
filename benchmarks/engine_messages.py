"""What is done with the engine's messages alone, by vLLM's frontend and with text and log-probs deferred."""

import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.demo.server import MODEL
from darts_server.vllm.deferred import CachingTokenizer, Deferred, DeferredCompletion
from darts_server.vllm.new_states import change_new_states, changing_state
from darts_server.vllm.packed_outputs import receive_packed

LOGPROBS = (0, 1, 5, None)
ROWS = (
    VLLM := "vLLM's way",
    RUNNING := "deferred: while a candidate runs",
    UNPACKED := "unpacked, a few hundred tokens at a time",
    READ := "text and log-probs, of returned tokens alone",
)


def measure_messages(requests: int, tokens: int, rounds: int) -> str:
    """Feed the same messages to both, in turns; return the table: medians, microseconds of CPU per token."""
    lines = [f"| us per token | {' | '.join(f'`logprobs` {one}' for one in LOGPROBS)} |"]
    lines.append("|---" * (len(LOGPROBS) + 1) + "|")
    costs: dict[tuple[str, int | None], list[float]] = {}
    for number in range(rounds + 1):
        for logprobs in LOGPROBS:
            messages = make_messages(requests, tokens, logprobs)
            for way in (_run_vllms, _run_deferred) if number % 2 else (_run_deferred, _run_vllms):
                for row, seconds in way(messages, requests, tokens, logprobs).items():
                    if number:  # the first round warms up
                        costs.setdefault((row, logprobs), []).append(seconds / (requests * tokens) * 1e6)
    for row in ROWS:
        cells = [f"{statistics.median(costs[row, one]):.1f}" if (row, one) in costs else "" for one in LOGPROBS]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_messages(requests: int, tokens: int, logprobs: int | None) -> list[list[bytearray]]:
    """Encode a message for each step, with a token of each request."""
    encoder, random = MsgpackEncoder(), Random(0)
    messages = []
    for step in range(tokens):
        outputs = []
        for number in range(requests):
            token = random.randrange(2, 64)
            output = EngineCoreOutput(str(number), [token], new_logprobs=_logprobs(token, logprobs))
            if step == tokens - 1:
                output.finish_reason = FinishReason.LENGTH
            outputs.append(output)
        frames: Sequence[Any] = encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
        messages.append([bytearray(bytes(frame)) for frame in frames])
    return messages


def _logprobs(token: int, logprobs: int | None) -> LogprobsLists | None:
    if logprobs is None:
        return None
    token_ids = np.arange(logprobs + 1, dtype=np.int32)[None, :]
    token_ids[0, 0] = token
    values = -np.arange(1, logprobs + 2, dtype=np.float32)[None, :]
    return LogprobsLists(token_ids, values, np.ones(1, dtype=np.int32))


class _Frontend:
    """vLLM's half of an engine that is in the API process."""

    def __init__(self, requests: int, tokens: int, logprobs: int | None) -> None:
        self.processor = OutputProcessor(get_tokenizer(str(MODEL)), log_stats=False)
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.params = SamplingParams(logprobs=logprobs, max_tokens=tokens, output_kind=RequestOutputKind.FINAL_ONLY)
        self.collectors = [RequestOutputCollector(RequestOutputKind.FINAL_ONLY, str(n)) for n in range(requests)]

    def add(self, number: int) -> None:
        request = EngineCoreRequest(
            request_id=str(number),
            external_req_id=str(number),
            prompt_token_ids=[4, 5, 6],
            mm_features=None,
            sampling_params=self.params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor.add_request(request, None, None, 0, self.collectors[number])

    def receive(self, messages: Sequence[Sequence[bytearray]]) -> None:
        for message in messages:
            self.processor.process_outputs(self.decoder.decode(message).outputs, 1.0, None)

    def output(self, number: int) -> Any:
        return self.collectors[number].output


def _run_vllms(
    messages: Sequence[Sequence[bytearray]], requests: int, tokens: int, logprobs: int | None
) -> dict[str, float]:
    frontend = _Frontend(requests, tokens, logprobs)
    for number in range(requests):
        frontend.add(number)
    return {VLLM: _timed(lambda: frontend.receive(messages))}


def _run_deferred(
    messages: Sequence[Sequence[bytearray]], requests: int, tokens: int, logprobs: int | None
) -> dict[str, float]:
    frontend = _Frontend(requests, tokens, logprobs)
    receive_packed(SimpleNamespace(decoder=frontend.decoder))
    change_new_states(frontend.processor)
    tokenizer = CachingTokenizer(frontend.processor.tokenizer)
    deferred = [Deferred(tokenizer, stop_strings=False, returns_logprobs=True) for _ in range(requests)]
    for number, each in enumerate(deferred):
        with changing_state(each.begin):
            frontend.add(number)
    running = _timed(lambda: frontend.receive(messages))
    # More than `PACKED_BYTES` were unpacked on the way, and count there.
    unpacked = _timed(lambda: [each.logprobs() for each in deferred])
    outputs = [each.output(frontend.output(number)) for number, each in enumerate(deferred)]

    def read() -> None:
        for output in outputs:
            completion = output.outputs[0]
            assert isinstance(completion, DeferredCompletion)
            for _ in completion.make():
                pass

    return {RUNNING: running, UNPACKED: unpacked, READ: _timed(read)}


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
