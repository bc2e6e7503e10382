"""What was deferred is, field by field, what vLLM makes as the tokens come, from the same messages of the engine."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
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
    change_new_states,
    changing_state,
    is_candidate,
    make_deferred,
    sampled_logprobs,
    truncate_output,
)
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
    return encoded(EngineCoreOutputs(outputs=outputs, timestamp=1.0))


def encoded(outputs: EngineCoreOutputs) -> list[bytearray]:
    frames: Sequence[Any] = MsgpackEncoder().encode(outputs)
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


@given(st.randoms(use_true_random=False))
def test_deferred_outputs_are_vllms_own_and_text_and_log_probs_are_made_without_each_other(random: Random) -> None:
    case = draw_case(random)
    output, wanted = run(DeferringFrontend(case)), run(Frontend(case))
    (completion,) = output.outputs
    names = random.sample(["text", "logprobs", "cumulative_logprob"], 3)
    deferred = {name for name in names if name not in vars(completion)}
    assert deferred >= ({"logprobs", "cumulative_logprob"} if case.params.logprobs is not None else set())
    assert deferred >= (set() if case.params.stop else {"text"})
    assert getattr(completion, names[0]) == getattr(wanted.outputs[0], names[0])
    with_it = {"text"} if names[0] == "text" else {"logprobs", "cumulative_logprob"}
    assert {name for name in names if name not in vars(completion)} == deferred - with_it
    assert_same(output, wanted)


@given(st.randoms(use_true_random=False))
def test_a_truncated_output_is_that_of_a_request_with_so_many_tokens(random: Random) -> None:
    case = draw_case(random)
    outputs = [run(DeferringFrontend(case)), run(Frontend(case))]
    (whole,) = outputs[1].outputs
    tokens = random.randint(1, len(whole.token_ids))
    wanted = run(Frontend(first_tokens(case, tokens)))
    assume(wanted.outputs[0].finish_reason == "length")  # and not a stop string of its last step
    if random.random() < 0.5:  # cut twice
        longer = random.randint(tokens, len(whole.token_ids))
        outputs = [truncate_output(output, longer, case.params, tokenizer(case.tokenizer)) for output in outputs]
    if random.random() < 0.3:
        assert outputs[0].outputs[0].text is not None  # made already
    deferred, plain = (truncate_output(output, tokens, case.params, tokenizer(case.tokenizer)) for output in outputs)
    if case.params.logprobs is not None:
        assert "logprobs" not in vars(deferred.outputs[0])
    values = sampled_logprobs(deferred.outputs[0])
    assert (None if values is None else list(values)) == sampled_logprobs(wanted.outputs[0])
    assert_same(deferred, wanted)
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(plain.outputs[0], name) == getattr(wanted.outputs[0], name)
    assert entries(plain.outputs[0].logprobs) == entries(wanted.outputs[0].logprobs)


def first_tokens(case: Case, tokens: int) -> Case:
    """What the engine sends if ``max_tokens`` is so many."""
    messages, decoder = [], MsgpackDecoder(EngineCoreOutputs)
    for message in case.messages:
        decoded: EngineCoreOutputs = decoder.decode(message)
        (output,) = (output for output in decoded.outputs if output.request_id == ID)
        taken = min(tokens, len(output.new_token_ids))
        output.new_token_ids = output.new_token_ids[:taken]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(0, taken)
        tokens -= taken
        output.finish_reason, output.stop_reason = None if tokens else FinishReason.LENGTH, None
        messages.append(encoded(decoded))
        if not tokens:
            break
    return replace(case, messages=messages, aborted=False)


def test_an_output_is_whole_after_one_of_it_was_truncated() -> None:
    case = long_case()
    output, wanted = run(DeferringFrontend(case)), run(Frontend(case))
    cut = truncate_output(output, 9, case.params, tokenizer(case.tokenizer)).outputs[0]
    assert cut.logprobs == (wanted.outputs[0].logprobs or [])[:9]
    assert cut.text == truncate_output(wanted, 9, case.params, tokenizer(case.tokenizer)).outputs[0].text
    assert_same(output, wanted)


def test_what_is_returned_beside_tokens_and_log_probs_is_truncated() -> None:
    @dataclass
    class Span:
        version: str
        start: int
        end: int

    output = run(Frontend(long_case()))
    (whole,) = output.outputs
    whole.token_ids, whole.logprobs = [7] * 4, None
    whole.sampling_mask, whole.routed_experts = SamplingMask([[1], [2, 3], [4], [5]]), np.arange(6)
    whole.weight_versions = [Span("a", 0, 1), Span("b", 1, 3), Span("c", 3, 4)]  # type: ignore[attr-defined]  # since 0.32
    cut: Any = truncate_output(output, 2, long_case().params, None).outputs[0]
    assert (cut.sampling_mask.token_ids, cut.routed_experts.tolist()) == ([[1], [2, 3]], [0, 1, 2, 3])
    assert cut.weight_versions == [Span("a", 0, 1), Span("b", 1, 2)]


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


def test_what_cannot_be_made_is_the_same_error_each_time_it_is_read() -> None:
    def fail(_: CompletionOutput) -> Iterator[None]:
        yield
        raise ZeroDivisionError

    wanted = run(Frontend(long_case())).outputs[0]
    completion = DeferredCompletion.of(wanted, fail, None, {})
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            _ = completion.text
    assert completion.logprobs == wanted.logprobs


def test_pauses_come_once_for_so_many_log_probs_however_they_were_sent() -> None:
    random = Random(6)
    params = SamplingParams(logprobs=70, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=64)
    messages = [draw_message(random, params, 1, first=False, last=end == 63) for end in range(64)]
    completion = run(DeferringFrontend(Case(params, messages, "tiny", aborted=False))).outputs[0]
    assert isinstance(completion, DeferredCompletion)
    assert 1 < sum(1 for _ in completion.make("logprobs")) <= 64 * 153 / SLICE


def test_nan_is_found_wherever_it_is() -> None:
    random = Random(7)
    params = SamplingParams(logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=600)
    for place in (None, 0, 300, 599):
        messages = [draw_message(random, params, 1, first=False, last=end == 599) for end in range(600)]
        if place is not None:
            decoded = MsgpackDecoder(EngineCoreOutputs).decode(messages[place])
            for output in decoded.outputs:
                arrays = output.new_logprobs
                changed = arrays.logprobs.copy()
                changed[:, 0] = float("nan")
                output.new_logprobs = arrays._replace(logprobs=changed)
            messages[place] = encoded(decoded)
        frontend = DeferringFrontend(Case(params, messages, "tiny", aborted=False))
        run(frontend)
        assert frontend.deferred.has_nan() is (place is not None)


def test_an_unknown_field_is_an_attribute_error() -> None:
    completion, name = run(DeferringFrontend(long_case())).outputs[0], "no_such_field"
    with pytest.raises(AttributeError, match=name):
        getattr(completion, name)


# --- The state of a request is changed when it is created, once, or the request fails


class Processor:
    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any) -> None:
        self.request_states[request.request_id] = SimpleNamespace(of=request.request_id)


def new_processor() -> Any:
    processor: Any = Processor()
    change_new_states(processor)
    return processor


def test_only_the_first_state_in_a_block_is_changed() -> None:
    processor, changed = new_processor(), list[Any]()
    processor.add_request(SimpleNamespace(request_id="before"))
    with changing_state(changed.append):
        processor.add_request(SimpleNamespace(request_id="one"))
        processor.add_request(SimpleNamespace(request_id="another"))
    processor.add_request(SimpleNamespace(request_id="after"))
    assert [state.of for state in changed] == ["one"]
    assert [is_candidate(state) for state in processor.request_states.values()] == [False, True, False, False]


def test_a_request_whose_state_was_not_changed_fails() -> None:
    with pytest.raises(RuntimeError, match="without OutputProcessor"), changing_state(lambda _: None):
        pass


def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), changing_state(lambda _: None):
        raise ZeroDivisionError
