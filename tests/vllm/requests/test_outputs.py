"""Deferred outputs equal vLLM's own field by field, made from the same messages of the engine."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.engine.port import NO_TOKENS, TokenSlice
from darts_server.offline.demo.server import MODEL
from darts_server.vllm.requests import outputs
from darts_server.vllm.requests.logprob_json import ArrayLogprobs
from darts_server.vllm.requests.outputs import (
    SLICE,
    CachingTokenizer,
    DeferredCompletion,
    DeferredOutput,
    make_deferred_fields,
    sampled_logprobs,
    truncate_output,
)
from tests.vllm.tokenizers import byte_level_tokenizer, multi_byte_tokenizer

ID = "0_cmpl-1"
PROMPT = [4, 5, 6]
VOCABULARY = 30
"""Tokens that all tokenizers here have."""


@cache
def tokenizer(name: str) -> Any:
    return multi_byte_tokenizer() if name == "multi-byte" else get_tokenizer(str(MODEL))


@dataclass(frozen=True)
class Case:
    """A request, and the messages that the engine sends for it. ``aborted``: whether an abort follows them."""

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
    # Writable, as the socket's frames are. Otherwise torch warns.
    return [bytearray(bytes(frame)) for frame in frames]


def draw_logprobs(random: Random, params: SamplingParams, tokens: Sequence[int]) -> LogprobsLists | None:
    """Draw arrays as wide as the widest request of the batch wants. Wide arrays arrive in separate frames."""
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
    """vLLM's objects of the API process that process outputs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.processor = OutputProcessor(tokenizer(case.tokenizer), log_stats=False)
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, ID)

    def add(self, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
        params = self.case.params
        request = EngineCoreRequest(ID, [*prompt], None, params, None, 0.0, None, None, None, external_req_id="cmpl-1")
        self.processor.add_request(request, "a prompt", None, 0, self.collector)
        return request

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
    """The same with a deferred output. ``prefix``: tokens that were generated before, in the engine's prompt."""

    def __init__(self, case: Case, prefix: TokenSlice = NO_TOKENS, *, returns_logprobs: bool = True) -> None:
        super().__init__(case)
        self.prefix = prefix
        caching = CachingTokenizer(self.processor.tokenizer)
        self.deferred = DeferredOutput(caching, case.params, prefix, returns_logprobs=returns_logprobs)

    def add(self, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
        request = super().add([*prompt, *self.prefix.token_ids])
        self.deferred.start_collecting(request, self.processor.request_states[ID])
        return request


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
    """Return log-probs with their order, in which equal dicts may differ."""
    return logprobs if logprobs is None or isinstance(logprobs, FlatLogprobs) else [list(p.items()) for p in logprobs]


@given(st.randoms(use_true_random=False))
def test_log_probs_can_be_read_while_a_candidate_runs(random: Random) -> None:
    case = draw_case(random)
    frontend = DeferringFrontend(case)
    wanted = run(Frontend(case))
    whole = sampled(wanted)
    frontend.add()
    read: list[float] = []
    for message in case.messages:
        frontend.receive(message)
        if random.random() < 0.5 and (so_far := frontend.deferred.token_logprobs) is not None:
            assert list(so_far[: len(read)]) == read
            read = list(so_far)
    assert whole is None or read == whole[: len(read)]
    output = frontend.end()
    values = sampled_logprobs(output.outputs[0])
    assert (None if values is None else list(values)) == whole
    assert_same(output, wanted)


def sampled(output: RequestOutput) -> list[float] | None:
    """Return the log-prob of each token of vLLM's output, without those of top tokens."""
    (completion,) = output.outputs
    if completion.logprobs is None:
        return None
    positions = zip(completion.logprobs, completion.token_ids, strict=True)
    return [position[token].logprob for position, token in positions if position]


@given(st.randoms(use_true_random=False))
def test_deferred_outputs_equal_vllms_own_and_text_and_log_probs_are_made_without_each_other(random: Random) -> None:
    case = draw_case(random)
    output = run(DeferringFrontend(case))
    wanted = run(Frontend(case))
    (completion,) = output.outputs
    names = random.sample(["text", "logprobs", "cumulative_logprob"], 3)
    deferred = {name for name in names if name not in vars(completion)}
    assert deferred >= ({"logprobs", "cumulative_logprob"} if case.params.logprobs is not None else set())
    assert deferred >= (set() if case.params.stop else {"text"})
    assert getattr(completion, names[0]) == getattr(wanted.outputs[0], names[0])
    assert {name for name in names if name not in vars(completion)} == deferred - {names[0]}
    assert_same(output, wanted)


def decoded_at_once(caching: CachingTokenizer, prompt: list[int], tokens: list[int], skip: bool) -> str | None:
    making = caching.decode_at_once(prompt, tokens, skip)
    while True:
        try:
            next(making)
        except StopIteration as end:
            text: str | None = end.value
            return text


WORDS = ["hello", " 世界", "🙂 the", "é", " \ufffd!", "日"]


@pytest.mark.parametrize("text_slice", [3, 8192])
def test_a_text_that_is_decoded_at_once_is_vllms_text(text_slice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "TEXT_SLICE", text_slice)
    bytewise = byte_level_tokenizer(WORDS)
    caching = CachingTokenizer(bytewise)
    random = Random(text_slice)
    vocabulary = len(bytewise)
    pieces = [bytewise.encode(word) for word in WORDS]
    made = 0
    for _ in range(2_000):
        tokens: list[int] = []
        for _ in range(random.randrange(1, 12)):
            # Some characters begin or end outside of the output, and some tokens come by chance.
            piece = random.choice(pieces)
            tokens += piece[random.choice([0, 0, 0, 1]) :]
            if random.random() < 0.1:
                tokens.append(random.randrange(vocabulary))
        prompt = [*random.choice(pieces), *random.choice(pieces)][: random.randrange(1, 6)]
        skip = random.random() < 0.5
        request = EngineCoreRequest(
            ID, prompt, None, SamplingParams(skip_special_tokens=skip), None, 0.0, None, None, None
        )
        stepwise = FastIncrementalDetokenizer(bytewise, request)
        stepwise.update(tokens, False)
        text = decoded_at_once(caching, prompt, tokens, skip)
        made += text is not None
        assert text in (None, stepwise.output_text)
    assert made > 500


def test_the_text_after_a_prompt_of_embeddings_is_vllms() -> None:
    case = Case(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), [], "multi-byte", aborted=True)
    texts = []
    for kind in (Frontend, DeferringFrontend):
        frontend = kind(case)
        request = EngineCoreRequest(ID, None, None, case.params, None, 0.0, None, None, None, external_req_id="cmpl-1")
        request.prompt_embeds = torch.zeros(3, 4)
        frontend.processor.add_request(request, None, None, 0, frontend.collector)
        if isinstance(frontend, DeferringFrontend):
            frontend.deferred.start_collecting(request, frontend.processor.request_states[ID])
        # The first token of this tokenizer is a part of a character.
        output = EngineCoreOutput(ID, [0, 1, 2, 3], finish_reason=FinishReason.LENGTH)
        frontend.receive(encoded(EngineCoreOutputs(outputs=[output], timestamp=1.0)))
        texts.append(frontend.end().outputs[0].text)
    assert texts[0] == texts[1] != ""


def test_a_text_is_made_token_by_token_where_the_tokens_of_a_text_do_not_just_join() -> None:
    plain = SamplingParams()
    bytewise = CachingTokenizer(byte_level_tokenizer(WORDS))
    assert bytewise.can_decode_at_once(plain)
    assert not bytewise.can_decode_at_once(SamplingParams(stop=["a"]))
    joined = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert not bytewise.can_decode_at_once(joined)
    stripping: Any = byte_level_tokenizer(WORDS)
    stripping._tokenizer.decoder = decoders.Metaspace()
    assert not CachingTokenizer(stripping).can_decode_at_once(plain)
    assert not CachingTokenizer(object()).can_decode_at_once(plain)


@given(st.randoms(use_true_random=False))
def test_a_truncated_output_equals_the_output_of_a_request_with_so_many_tokens(random: Random) -> None:
    case = draw_case(random)
    output, (whole,) = run(DeferringFrontend(case)), run(Frontend(case)).outputs
    tokens = random.randint(1, len(whole.token_ids))
    wanted = run(Frontend(first_tokens(case, tokens)))
    # Not at a stop string in its last step.
    assume(wanted.outputs[0].finish_reason == "length")
    # Some are truncated twice, and the first text is made already.
    if random.random() < 0.5:
        output = truncate_output(output, random.randint(tokens, len(whole.token_ids)))
    if random.random() < 0.3:
        assert output.outputs[0].text is not None
    cut = truncate_output(output, tokens)
    if case.params.logprobs is not None:
        assert "logprobs" not in vars(cut.outputs[0])
    values = sampled_logprobs(cut.outputs[0])
    assert (None if values is None else list(values)) == sampled(wanted)
    assert_same(cut, wanted)


@given(st.randoms(use_true_random=False))
def test_a_resumed_output_equals_the_output_of_a_request_that_was_never_stopped(random: Random) -> None:
    case = draw_case(random)
    wanted = run(Frontend(case))
    before = random.randint(0, len(case.messages) - 1)
    first = run(Frontend(replace(case, messages=case.messages[:before], aborted=True)))
    assume(first.outputs[0].finish_reason == "abort")
    tokens = list(first.outputs[0].token_ids)
    values = sampled(first)
    messages = [*case.messages[before:]]
    output = run(DeferringFrontend(replace(case, messages=messages), TokenSlice(tokens, values)))
    completion = output.outputs[0]
    whole = wanted.outputs[0]
    # Some are truncated too.
    if random.random() < 0.3:
        cut = random.randint(1, len(whole.token_ids))
        wanted = run(Frontend(first_tokens(case, cut)))
        whole = wanted.outputs[0]
        completion = truncate_output(output, cut).outputs[0]
        assume(whole.finish_reason == "length")
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob"):
        assert getattr(completion, name) == getattr(whole, name), name
    assert output.prompt_token_ids == PROMPT
    made = sampled_logprobs(completion)
    assert (None if made is None else list(made)) == sampled(wanted)
    assert (entries(completion.logprobs) or [])[len(tokens) :] == (entries(whole.logprobs) or [])[len(tokens) :]


def first_tokens(case: Case, tokens: int) -> Case:
    """Return the messages of the engine for ``max_tokens`` tokens."""
    messages = []
    decoder = MsgpackDecoder(EngineCoreOutputs)
    for message in case.messages:
        decoded: EngineCoreOutputs = decoder.decode(message)
        (output,) = (output for output in decoded.outputs if output.request_id == ID)
        taken = min(tokens, len(output.new_token_ids))
        output.new_token_ids = output.new_token_ids[:taken]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(0, taken)
        tokens -= taken
        output.finish_reason = None if tokens else FinishReason.LENGTH
        output.stop_reason = None
        messages.append(encoded(decoded))
        if not tokens:
            break
    return replace(case, messages=messages, aborted=False)


def test_experts_masks_and_weight_versions_are_truncated_too() -> None:
    @dataclass
    class Span:
        version: str
        start: int
        end: int

    output = run(DeferringFrontend(long_case()))
    whole: Any = output.outputs[0]
    whole.token_ids = [7] * 4
    whole.sampling_mask = SamplingMask([[1], [2, 3], [4], [5]])
    whole.routed_experts = np.arange(6)
    # vLLM has this field since 0.32.
    whole.weight_versions = [Span("a", 0, 1), Span("b", 1, 3), Span("c", 3, 4)]
    cut: Any = truncate_output(output, 2).outputs[0]
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
    output = run(DeferringFrontend(case))

    async def count_turns() -> int:
        making = asyncio.create_task(make_deferred_fields(output))
        turns = 0
        while not making.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(count_turns()) > 2
    assert_same(output, run(Frontend(case)))


def test_an_output_whose_caller_left_while_it_was_made_can_still_be_read() -> None:
    case = long_case()
    output = run(DeferringFrontend(case))
    completion = output.outputs[0]
    assert isinstance(completion, DeferredCompletion)
    for number, _ in enumerate(completion.deferred.make_fields(completion, ["text", "logprobs"])):
        if number == 1:
            break
    assert_same(output, run(Frontend(case)))


def test_a_copy_of_an_output_has_everything_also_after_one_was_truncated() -> None:
    output, (wanted,) = run(DeferringFrontend(long_case())), run(Frontend(long_case())).outputs
    assert truncate_output(output, 9).outputs[0].logprobs == (wanted.logprobs or [])[:9]
    copied = replace(output.outputs[0], index=3)
    whole = replace(wanted, index=3)
    assert all(getattr(copied, field.name) == getattr(whole, field.name) for field in fields(CompletionOutput))


def test_log_probs_that_only_the_scorer_requested_are_not_returned() -> None:
    case = long_case()
    frontend = DeferringFrontend(case, returns_logprobs=False)
    completion = run(frontend).outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob, sampled_logprobs(completion)) == (None, None, None)
    assert completion.text == run(Frontend(case)).outputs[0].text
    assert len(frontend.deferred.token_logprobs or ()) == len(completion.token_ids)


def test_a_pause_follows_every_slice_of_log_probs_however_they_were_sent() -> None:
    random = Random(6)
    params = SamplingParams(logprobs=70, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=64)
    messages = [draw_message(random, params, 1, first=False, last=end == 63) for end in range(64)]
    completion = run(DeferringFrontend(Case(params, messages, "tiny", aborted=False))).outputs[0]
    assert isinstance(completion, DeferredCompletion)
    assert 1 < sum(1 for _ in completion.deferred.make_fields(completion, ["logprobs"])) <= 64 * 153 / SLICE


def test_a_finished_request_is_freed_at_once_with_its_arrays() -> None:
    """The garbage collector counts objects, and a few arrays can be many megabytes."""
    gc.collect()
    gc.disable()
    try:
        frontend = DeferringFrontend(long_case())
        frontend.add()
        state = weakref.ref(frontend.processor.request_states[ID])
        output = frontend.run()
        (completion,) = output.outputs
        assert isinstance(completion, DeferredCompletion)
        completion.logprobs = ArrayLogprobs(completion)
        kept = weakref.ref(completion)
        deferred = weakref.ref(frontend.deferred)
        assert state() is None
        del frontend, output, completion
        assert (kept(), deferred()) == (None, None)
    finally:
        gc.enable()


def test_only_the_log_probs_that_the_request_wants_are_kept() -> None:
    random = Random(7)
    params = SamplingParams(logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=2)
    wide = SamplingParams(logprobs=20)
    message = draw_message(random, params, 2, first=False, last=True)
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(message).outputs
    for each in outputs:
        each.new_logprobs = draw_logprobs(random, wide, each.new_token_ids)
    frontend = DeferringFrontend(Case(params, [encoded(EngineCoreOutputs(outputs=outputs))], "tiny", aborted=False))
    completion = run(frontend).outputs[0]
    assert [len(entry or ()) <= 3 for entry in completion.logprobs or ()] == [True, True]
    assert {arrays.logprobs.shape[1] for arrays in frontend.deferred._arrays} == {3}
