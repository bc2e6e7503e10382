"""What was deferred is, field by field, what vLLM makes as the tokens come, from the same messages of the engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.demo.server import MODEL
from darts_server.vllm.deferred import (
    SLICE,
    CachingTokenizer,
    Deferred,
    DeferredCompletion,
    make_deferred,
    sampled_logprobs,
)
from darts_server.vllm.new_states import change_new_states, changing_state
from darts_server.vllm.packed_outputs import receive_packed
from tests.vllm.tokenizers import multi_byte_tokenizer

ID = "0_cmpl-1"
VOCABULARY = 30
"""Tokens that all tokenizers here have."""


@cache
def tokenizer(name: str) -> Any:
    return multi_byte_tokenizer() if name == "multi-byte" else get_tokenizer(str(MODEL))


@dataclass(frozen=True)
class Case:
    """A request, and the messages that the engine sends for it; ``aborted``: after the last of them."""

    params: SamplingParams
    messages: Sequence[Sequence[bytearray]]
    tokenizer: str
    aborted: bool


def draw_case(random: Random) -> Case:
    total = random.randint(1, 40)
    logprobs = random.choice([None, 0, 0, 1, 5, -1])
    prompt_logprobs = random.choice([None, None, 0, 2])
    name = random.choice(["tiny", "multi-byte"])
    detokenize = random.random() < 0.9
    params = SamplingParams(
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=random.random() < 0.3,
        detokenize=detokenize,
        stop=random.choice([None, None, ["1"], ["a=", "日", "7A"]]) if detokenize else None,
        include_stop_str_in_output=random.random() < 0.5,
        skip_special_tokens=random.random() < 0.5,
        spaces_between_special_tokens=random.random() < 0.5,
        min_tokens=random.choice([0, 0, 5]),
        max_tokens=max(5, total),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    aborted = random.random() < 0.3
    messages: list[list[bytearray]] = []
    while total > 0:
        count = min(total, random.choice([1, 1, 1, 3]))
        total -= count
        messages.append(draw_message(random, params, count, first=not messages, last=total == 0 and not aborted))
    return Case(params, messages, name, aborted)


def draw_message(random: Random, params: SamplingParams, count: int, *, first: bool, last: bool) -> list[bytearray]:
    tokens = [random.randrange(VOCABULARY) for _ in range(count)]
    output = EngineCoreOutput(ID, tokens, new_logprobs=draw_logprobs(random, params, tokens))
    if first and params.prompt_logprobs is not None:
        output.new_prompt_logprobs_tensors = LogprobsTensors(
            torch.tensor([[random.randrange(VOCABULARY) for _ in range(params.prompt_logprobs + 1)] for _ in range(2)]),
            torch.rand(
                (2, params.prompt_logprobs + 1), generator=torch.Generator().manual_seed(random.getrandbits(30))
            ),
            torch.tensor([1, 2]),
        )
    if last:
        output.finish_reason = random.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION])
        output.stop_reason = random.choice([None, 3]) if output.finish_reason is FinishReason.STOP else None
    other = EngineCoreOutput("another", [1], new_logprobs=draw_logprobs(random, params, [1]))
    outputs = random.choice([[output], [other, output], [output, other]])
    frames: Sequence[Any] = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
    return [bytearray(bytes(frame)) for frame in frames]  # writable as the socket's are: torch warns of others


def draw_logprobs(random: Random, params: SamplingParams, tokens: Sequence[int]) -> LogprobsLists | None:
    """As wide as the widest request of the batch asks for; wide ones come in frames of their own."""
    if params.logprobs is None:
        return None
    width = VOCABULARY if params.logprobs == -1 else params.logprobs + 1 + random.choice([0, 0, 0, 2, 80])
    numbers = np.random.default_rng(random.getrandbits(30))
    token_ids = numbers.integers(0, VOCABULARY, (len(tokens), width), dtype=np.int32)
    token_ids[:, 0] = tokens
    of_token = -numbers.random(VOCABULARY, dtype=np.float32)
    logprobs = of_token[token_ids]
    return LogprobsLists(token_ids, logprobs, numbers.integers(1, 9, len(tokens), dtype=np.int32))


class Frontend:
    """vLLM's half of an engine that is in the API process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.processor = OutputProcessor(tokenizer(case.tokenizer), log_stats=False)
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, ID)

    def add(self) -> None:
        request = EngineCoreRequest(
            request_id=ID,
            external_req_id="cmpl-1",
            prompt_token_ids=[4, 5, 6],
            mm_features=None,
            sampling_params=self.case.params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor.add_request(request, "a prompt", None, 0, self.collector)

    def run(self) -> RequestOutput:
        for message in self.case.messages:
            self.receive(message)
        return self.end()

    def end(self) -> RequestOutput:
        """Return the output, after an abort if it has not finished."""
        self.processor.abort_requests([ID], internal=True)
        assert isinstance(self.collector.output, RequestOutput)
        return self.collector.output

    def receive(self, message: Sequence[bytearray]) -> None:
        self.processor.process_outputs(self.decoder.decode(message).outputs, 1.0, None)


class DeferringFrontend(Frontend):
    def __init__(self, case: Case, *, returns_logprobs: bool = True) -> None:
        super().__init__(case)
        receive_packed(SimpleNamespace(decoder=self.decoder))
        change_new_states(self.processor)
        caching = CachingTokenizer(self.processor.tokenizer)
        has_stop = bool(case.params.stop)
        self.deferred = Deferred(caching, stop_strings=has_stop, returns_logprobs=returns_logprobs)

    def add(self) -> None:
        with changing_state(self.deferred.begin):
            super().add()

    def end(self) -> RequestOutput:
        return self.deferred.output(super().end())


def run(frontend: Frontend) -> RequestOutput:
    frontend.add()
    return frontend.run()


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    (completion,), (wanted,) = one.outputs, other.outputs
    assert entries(completion.logprobs) == entries(wanted.logprobs)
    for field in fields(CompletionOutput):
        assert getattr(completion, field.name) == getattr(wanted, field.name), field.name
    for name in set(vars(other)) - {"outputs", "metrics"}:
        assert getattr(one, name) == getattr(other, name), name


def entries(logprobs: Any) -> Any:
    """With the order of top log-probs, which dicts that are equal may differ in."""
    return logprobs if logprobs is None or isinstance(logprobs, FlatLogprobs) else [list(p.items()) for p in logprobs]


@given(st.randoms(use_true_random=False))
def test_deferred_outputs_are_vllms_own(random: Random) -> None:
    case = draw_case(random)
    assert_same(run(DeferringFrontend(case)), run(Frontend(case)))


@given(st.randoms(use_true_random=False))
def test_log_probs_can_be_read_while_a_candidate_runs(random: Random) -> None:
    case = draw_case(random)
    frontend, wanted = DeferringFrontend(case), run(Frontend(case))
    whole = sampled_logprobs(wanted.outputs[0])
    frontend.add()
    read: list[float] = []
    for message in case.messages:
        frontend.receive(message)
        if random.random() < 0.5 and (values := frontend.deferred.logprobs()) is not None:
            assert list(values[: len(read)]) == read
            read = list(values)
    assert whole is None or read == list(whole)[: len(read)]
    output = frontend.end()
    assert whole is None or list(sampled_logprobs(output.outputs[0]) or ()) == list(whole)
    assert_same(output, wanted)


@cache
def long_case() -> Case:
    random = Random(5)
    params = SamplingParams(logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=2 * SLICE)
    messages = [draw_message(random, params, 8, first=False, last=end == SLICE) for end in range(8, SLICE + 1, 8)]
    return Case(params, messages, "tiny", aborted=False)


def test_a_long_output_is_made_in_slices_and_other_tasks_run_meanwhile() -> None:
    case = long_case()
    output, turns = run(DeferringFrontend(case)), 0

    async def main() -> None:
        nonlocal turns
        making = asyncio.create_task(make_deferred(output))
        while not making.done():
            await asyncio.sleep(0)
            turns += 1

    asyncio.run(main())
    assert turns > 2
    assert_same(output, run(Frontend(case)))


def test_an_output_whose_caller_left_while_it_was_made_can_still_be_read() -> None:
    case = long_case()
    output = run(DeferringFrontend(case))
    completion = output.outputs[0]
    assert isinstance(completion, DeferredCompletion)
    for number, _ in enumerate(completion.make()):
        if number == 1:
            break
    assert_same(output, run(Frontend(case)))


def test_a_copy_of_an_output_has_everything() -> None:
    case = long_case()
    copied = replace(run(DeferringFrontend(case)).outputs[0], index=3)
    assert copied.index == 3
    wanted = run(Frontend(case)).outputs[0]
    assert (copied.text, copied.logprobs, copied.cumulative_logprob) == (
        wanted.text,
        wanted.logprobs,
        wanted.cumulative_logprob,
    )


def test_log_probs_that_only_the_scorer_requested_are_not_returned() -> None:
    case = long_case()
    frontend = DeferringFrontend(case, returns_logprobs=False)
    completion = run(frontend).outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob, sampled_logprobs(completion)) == (None, None, None)
    assert completion.text == run(Frontend(case)).outputs[0].text
    assert len(frontend.deferred.logprobs() or ()) == len(completion.token_ids)


def test_an_unknown_field_is_an_attribute_error() -> None:
    completion = run(DeferringFrontend(long_case())).outputs[0]
    with pytest.raises(AttributeError, match="no_such_field"):
        completion.no_such_field  # type: ignore[attr-defined]  # noqa: B018


def test_a_request_of_vllms_own_beside_candidates_is_as_without_them() -> None:
    case = long_case()
    frontend = Frontend(case)
    receive_packed(SimpleNamespace(decoder=frontend.decoder))
    change_new_states(frontend.processor)
    assert_same(run(frontend), run(Frontend(case)))
