"""Make text and log-probs of outputs when they are read: discarded candidates and truncated ends cost nothing.

While a request runs whose answer is sent whole, its state in vLLM only collects token ids and the engine's log-probs.
Only text that is searched for stop strings is made while it grows.
"""

import asyncio
import json
from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, cast
from weakref import ref

import anyio
import numpy as np
from msgspec import structs
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.logprobs import Logprob, SampleLogprobs, append_logprobs_for_next_position
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import NONES, LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsLists

from darts_server.engine.port import NO_TOKENS, TokenSlice
from darts_server.types import FinishReason

SLICE = 512
"""Number of tokens or log-probs that are made in one turn of the event loop, in some three milliseconds."""
TEXT_SLICE = 8192
"""Number of tokens that are decoded at once in one turn of the event loop, in one or two milliseconds."""
JOINING_DECODERS = ("ByteLevel", "Fuse")
"""Decoders that join the bytes of all tokens, and decode them. Most models since 2024 have ``ByteLevel``."""
TEXT = "text"
LOGPROBS = "logprobs"
CUMULATIVE = "cumulative_logprob"
# In the text of a token that has only a part of a character.
INCOMPLETE = "\ufffd"
# vLLM's number of top log-probs that stands for the whole vocabulary.
ALL_TOKENS = -1
CONTEXT = 4
"""Number of earlier tokens by which vLLM corrects the text of an incomplete token."""
MAKE_COMPLETION = "_new_completion_output"
"""Method of vLLM's state of a request that makes the output of one choice."""
ABORTED = "abort"
"""vLLM's finish reason of aborted requests."""
# vLLM's finish reason of an output whose last token may be no part of its text.
STOP = "stop"
slice_limiter = anyio.CapacityLimiter(1)
"""Several tasks that make slices would each make a slice in every turn of the event loop."""


class NoTokens(list[int]):
    """An empty list that is true."""

    def __bool__(self) -> bool:
        return True


class CachingTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text_of_token = cache(self._text_of_token)
        self.incomplete_tokens: set[int] = set()
        """Cached tokens whose text ends with a part of a character."""
        self._decode_token = cache(lambda token: tokenizer.decode([token]))

    def _text_of_token(self, token: int) -> str:
        # vLLM calls the same function for the texts of its log-probs, and then corrects incomplete texts.
        (text,) = convert_ids_list_to_tokens(cast(TokenizerLike, self), [token])
        if text.endswith(INCOMPLETE):
            self.incomplete_tokens.add(token)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        # vLLM decodes log-probs token by token.
        if len(token_ids) == 1:
            return str(self._decode_token(token_ids[0]))
        return str(self.tokenizer.decode(token_ids))

    @cached_property
    def _joining_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the library ``tokenizers``, or None if its decoder is not one of `JOINING_DECODERS`."""
        tokenizer = getattr(self.tokenizer, "_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer) or tokenizer.decoder is None:
            return None
        decoder = json.loads(tokenizer.decoder.__getstate__())
        return tokenizer if decoder["type"] in JOINING_DECODERS else None

    def can_decode_at_once(self, params: SamplingParams) -> bool:
        # With these parameters vLLM leaves out the spaces that a tokenizer puts between special tokens.
        removes_spaces = not params.skip_special_tokens and not params.spaces_between_special_tokens
        # Stop strings end a text early.
        return self._joining_tokenizer is not None and not params.stop and not removes_spaces

    def decode_at_once(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> Generator[None, None, str | None]:
        """Return the text in a tenth of vLLM's time, or None if it might differ. Yield after each slice."""
        assert self._joining_tokenizer is not None
        decode = partial(self._joining_tokenizer.decode, skip_special_tokens=skip_special_tokens)
        # The tokens are decoded without their prompt, so a character must not begin in the prompt. It may begin before
        # last tokens without text, such as special tokens.
        prompt_end = decode(prompt[-CONTEXT:])
        if prompt and (not prompt_end or prompt_end.endswith(INCOMPLETE)):
            return None
        pieces = []
        for start in range(0, len(token_ids), TEXT_SLICE):
            piece = decode(token_ids[start : start + TEXT_SLICE])
            # vLLM holds back incomplete characters.
            if piece.endswith(INCOMPLETE):
                return None
            pieces.append(piece)
            yield
        return "".join(pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class DeferredOutput:
    """The parts from which the output of one request is made.

    Args:
        params: sampling parameters, as if a candidate had not been stopped.
        prefix: tokens that the candidate had generated before. They end the engine's prompt, and begin the output.
        returns_logprobs: whether the output has the engine's log-probs.
    """

    def __init__(
        self,
        tokenizer: CachingTokenizer,
        params: SamplingParams,
        prefix: TokenSlice = NO_TOKENS,
        *,
        returns_logprobs: bool = True,
    ) -> None:
        self.returns_logprobs = returns_logprobs
        self.token_logprobs: array[float] | None = None
        """Log-prob of each token generated so far, or None if the engine computes none."""
        self._params = params
        self._prefix = prefix
        self._tokenizer: CachingTokenizer | None = None
        if params.detokenize and tokenizer.tokenizer is not None:
            self._tokenizer = tokenizer
        self._decodes_at_once = self._tokenizer is not None and self._tokenizer.can_decode_at_once(params)
        self._detokenizer: IncrementalDetokenizer | None = None
        self._arrays: list[LogprobsLists] = []

    def start_collecting(self, request: EngineCoreRequest, state: RequestState) -> None:
        """Change the new state of the candidate's request: it only collects, and begins with the earlier tokens."""
        # The engine's prompt ends with the prefix. In vLLM's state the prefix is a part of the answer, so that the
        # output equals that of a request that was never stopped, even if a stop string or a character has tokens on
        # both sides.
        prefix_ids = list(self._prefix.token_ids)
        if prefix_ids:
            assert request.prompt_token_ids is not None
            state.prompt_token_ids = request.prompt_token_ids[: -len(prefix_ids)]

        # Text and log-probs are made later from this copy, which needs no images, and only the length of embeddings.
        tokens = state.prompt_token_ids or []
        if not tokens and request.prompt_embeds is not None:
            tokens = [0] * len(request.prompt_embeds)
        self._request = structs.replace(
            request,
            sampling_params=self._params,
            prompt_token_ids=tokens,
            prompt_embeds=None,
            mm_features=None,
        )

        # Without stop strings, text is made when it is read. With stop strings, vLLM needs the text at once.
        if not self._params.stop:
            # The tokens of a prompt of embeddings are unknown, so only vLLM's own detokenizer knows its text.
            self._decodes_at_once &= request.prompt_embeds is None
            if not prefix_ids and not self._decodes_at_once:
                self._detokenizer = state.detokenizer
            # The base class collects tokens, and makes no text.
            state.detokenizer = IncrementalDetokenizer()
        elif prefix_ids:
            state.detokenizer = self._new_detokenizer()
        if prefix_ids:
            assert state.detokenizer is not None
            state.detokenizer.update(prefix_ids, False)

        assert state.logprobs_processor is not None
        if state.logprobs_processor.logprobs is not None:
            self.token_logprobs = array("d", self._prefix.logprobs or ())
            # Replace the method of this object alone. vLLM still processes the log-probs of the prompt as they arrive.
            state.logprobs_processor._update_sample_logprobs = self._collect_logprobs  # type: ignore[method-assign]

        # vLLM calls this method for the final output alone, because the request is final-only. The state must not refer
        # to itself: until the next full garbage collection, the cycle would keep the arrays.
        weak_state = ref(state)

        def complete(*end: Any) -> CompletionOutput:
            state = weak_state()
            assert state is not None
            # Without the attribute, the state has vLLM's own method again.
            vars(state).pop(MAKE_COMPLETION, None)
            return self.defer_fields(state._new_completion_output(*end))

        setattr(state, MAKE_COMPLETION, complete)

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        tokenizer = None if self._tokenizer is None else self._tokenizer.tokenizer
        return IncrementalDetokenizer.from_new_request(tokenizer, self._request)

    def _collect_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        """Stand in for vLLM's ``_update_sample_logprobs``."""
        token_ids, logprobs, ranks = logprobs_lists[:3]
        # The engine's arrays are as wide as the request of the step that wants most log-probs.
        top = self._params.num_logprobs
        width = None if top is None or top == ALL_TOKENS else top + 1
        # Copies do not keep the whole message in memory.
        self._arrays.append(LogprobsLists(token_ids[:, :width].copy(), logprobs[:, :width].copy(), ranks.copy()))
        assert self.token_logprobs is not None
        # Column 0 has the sampled tokens.
        self.token_logprobs.frombytes(logprobs[:, 0].astype(np.float64).tobytes())

    def defer_fields(
        self,
        complete: CompletionOutput,
        deferred_fields: Collection[str] | None = None,
        **changes: Any,
    ) -> CompletionOutput:
        """Return a copy of an output with ``changes``, whose ``deferred_fields`` and log-probs are made when read."""
        if deferred_fields is None:
            # Stop strings needed the text already.
            deferred_fields = [] if self._params.stop else [TEXT]
        if self.token_logprobs is not None and self.returns_logprobs:
            deferred_fields = [*deferred_fields, LOGPROBS, CUMULATIVE]
        # Copy the fields without a constructor: a field that is missing in the copy is made when it is read.
        completion = DeferredCompletion.__new__(DeferredCompletion)
        fields = vars(completion)
        fields.update(vars(complete))
        fields.update(
            logprobs=None,
            cumulative_logprob=None,
            deferred=self,
            **changes,
        )
        for name in deferred_fields:
            fields.pop(name, None)
        return completion

    def make_output(self, prompt: Any, finish_reason: str = ABORTED, text: str | None = None) -> RequestOutput:
        """Make the output of a candidate that has generated only the earlier tokens. ``text``: None to decode them."""
        token_ids = list(self._prefix.token_ids)
        inputs: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        prompt_token_ids = inputs.get("prompt_token_ids") or []
        self._request = EngineCoreRequest(
            request_id="made",
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=self._params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        if self._params.logprobs is not None:
            self.token_logprobs = array("d", self._prefix.logprobs or ())
        completion = CompletionOutput(
            index=0,
            text=text or "",
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=finish_reason,
        )
        deferred_fields = []
        if text is None and token_ids:
            deferred_fields.append(TEXT)
        return RequestOutput(
            request_id="made",
            prompt=inputs.get("prompt"),
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=None,
            outputs=[self.defer_fields(completion, deferred_fields)],
            finished=True,
        )

    def make_fields(self, completion: "DeferredCompletion", names: Iterable[str]) -> Iterator[None]:
        for name in names:
            if name in vars(completion):
                continue
            if name == TEXT:
                yield from self._make_text(completion)
            elif name == LOGPROBS:
                completion.logprobs = yield from self.build_logprobs(completion.token_ids)
            else:
                completion.cumulative_logprob = 0.0
                # Unlike `sum`, vLLM does not compensate rounding.
                for value in sampled_logprobs(completion) or ():
                    completion.cumulative_logprob += value

    def _make_text(self, completion: CompletionOutput) -> Iterator[None]:
        if self._tokenizer is not None and self._decodes_at_once:
            tokens = completion.token_ids
            # The last token may be a stop token, which is no part of the text.
            if completion.finish_reason == STOP and not self._params.include_stop_str_in_output:
                tokens = tokens[:-1]
            prompt = self._request.prompt_token_ids or ()
            text = yield from self._tokenizer.decode_at_once(prompt, tokens, self._params.skip_special_tokens)
            if text is not None:
                completion.text = text
                return

        # vLLM's own way, token by token.
        detokenizer = self._detokenizer or self._new_detokenizer()
        # A detokenizer keeps the tokens that it was given, so it is used once.
        self._detokenizer = None
        tokens = list(completion.token_ids)
        for start in range(0, len(tokens), SLICE):
            end = start + SLICE
            is_stopped = completion.finish_reason == STOP and end >= len(tokens)
            if detokenizer.update(tokens[start:end], is_stopped) is not None:
                # Tokens that the engine has generated after a stop string, in the same step, are no part of the text.
                break
            yield
        completion.text = detokenizer.get_next_output_text(finished=True, delta=False)

    def build_logprobs(self, token_ids: Sequence[int]) -> Generator[None, None, SampleLogprobs]:
        """Return the log-probs of an output as vLLM's objects. Yield after each slice."""
        processor = self._new_processor()
        logprobs = processor.logprobs
        assert logprobs is not None
        assert processor.num_logprobs is not None
        for rows in self.logprob_rows(token_ids):
            values_by_row = rows.values.tolist()
            ranks = rows.ranks.tolist()
            for ids, values, rank, texts in zip(rows.ids, values_by_row, ranks, rows.texts, strict=True):
                append_logprobs_for_next_position(logprobs, ids, values, texts, rank, processor.num_logprobs)
            yield
        return logprobs

    def _new_processor(self) -> LogprobsProcessor:
        return LogprobsProcessor.from_new_request(cast(TokenizerLike | None, self._tokenizer), self._request)

    @property
    def has_texts(self) -> bool:
        return self._tokenizer is not None

    def logprob_rows(self, token_ids: Sequence[int]) -> Iterator["LogprobRows"]:
        """Yield the log-probs of an output in slices of `SLICE` numbers."""
        position = 0
        for arrays in self._logprob_arrays():
            # A truncated output has fewer tokens than the arrays.
            count = min(len(arrays.logprobs), len(token_ids) - position)
            step = max(1, SLICE // arrays.logprobs.shape[1])
            for start in range(0, count, step):
                end = min(start + step, count)
                ids = arrays.logprob_token_ids[start:end].tolist()
                texts = self._texts_of_rows(ids, token_ids, position)
                yield LogprobRows(ids, arrays.logprobs[start:end], arrays.sampled_token_ranks[start:end], texts)
                position += end - start

    def _texts_of_rows(
        self,
        ids: list[list[int]],
        token_ids: Sequence[int],
        first_position: int,
    ) -> list[Iterable[str | None]]:
        """``first_position``: place of the first row in the output."""
        if self._tokenizer is None:
            return [NONES] * len(ids)
        text_of_token = self._tokenizer.text_of_token
        texts = [[text_of_token(token) for token in row] for row in ids]
        incomplete_tokens = self._tokenizer.incomplete_tokens
        if not incomplete_tokens.isdisjoint(chain.from_iterable(ids)):
            # vLLM corrects incomplete texts by the sampled tokens before them.
            processor = self._new_processor()
            for row, tokens in enumerate(ids):
                position = first_position + row
                tokens_before = list(token_ids[max(0, position - CONTEXT) : position])
                for column, token in enumerate(tokens):
                    if token in incomplete_tokens:
                        texts[row][column] = processor._correct_decoded_token(token, tokens_before)
        return list(texts)

    def _logprob_arrays(self) -> Iterator[LogprobsLists]:
        prefix_logprobs = self._prefix.logprobs
        if prefix_logprobs:
            # The tokens before the candidate was resumed have only their own log-probs, without ranks.
            ids = np.array(self._prefix.token_ids[: len(prefix_logprobs)])
            no_ranks = np.full(len(prefix_logprobs), None)
            yield LogprobsLists(ids[:, None], np.array(prefix_logprobs)[:, None], no_ranks)
        if self._arrays:
            # In a step with another request's ``logprob_token_ids``, an array of vLLM may have fewer columns.
            width = min(arrays.logprobs.shape[1] for arrays in self._arrays)
            joined = LogprobsLists(
                np.concatenate([arrays.logprob_token_ids[:, :width] for arrays in self._arrays]),
                np.concatenate([arrays.logprobs[:, :width] for arrays in self._arrays]),
                np.concatenate([arrays.sampled_token_ranks for arrays in self._arrays]),
            )
            # Outputs are read more than once.
            self._arrays = [joined]
            yield joined


class LogprobRows(NamedTuple):
    """Log-probs of successive tokens of an output. Column 0 has the sampled tokens.

    ``ids``: token ids, a list for each token. ``values``: log-probs of the same shape. ``ranks``: ranks of the sampled
    tokens, None before the place where the candidate was resumed. ``texts``: texts of ``ids``, or None for each if the
    output has no text.
    """

    ids: list[list[int]]
    values: Any
    ranks: Any
    texts: list[Iterable[str | None]]


class DeferredCompletion(CompletionOutput):
    """vLLM's output of a candidate, without the fields that are made when they are read."""

    deferred: DeferredOutput

    # These replace fields of the base class. A missing field is made, even if vLLM gives it a default.
    text = cached_property(lambda self: self._make_now(TEXT))
    logprobs = cached_property(lambda self: self._make_now(LOGPROBS))
    cumulative_logprob = cached_property(lambda self: self._make_now(CUMULATIVE))

    def _make_now(self, name: str) -> Any:
        # Without pauses for other tasks.
        for _ in self.deferred.make_fields(self, [name]):
            pass
        return vars(self)[name]


def truncate_output(output: RequestOutput, tokens: int) -> RequestOutput:
    """Truncate an output as if ``tokens`` had been its ``max_tokens``."""
    (whole,) = output.outputs
    assert isinstance(whole, DeferredCompletion)
    changes: dict[str, Any] = {
        "token_ids": list(whole.token_ids[:tokens]),
        "finish_reason": FinishReason.LENGTH.value,
        "stop_reason": None,
    }
    if whole.sampling_mask is not None:
        changes["sampling_mask"] = replace(whole.sampling_mask, token_ids=whole.sampling_mask.token_ids[:tokens])
    experts = whole.routed_experts
    if experts is not None:
        # The experts of the prompt's tokens come first.
        dropped_tokens = max(0, len(whole.token_ids) - tokens)
        changes["routed_experts"] = experts[: len(experts) - dropped_tokens]
    # vLLM has this field since 0.32.
    spans = getattr(whole, "weight_versions", None)
    if spans is not None:
        changes["weight_versions"] = [replace(span, end=min(span.end, tokens)) for span in spans if span.start < tokens]
    truncated = copy(output)
    # The text is made again from the tokens that remain.
    truncated.outputs = [whole.deferred.defer_fields(whole, [TEXT], **changes)]
    return truncated


def to_choice(
    request_id: str,
    output: RequestOutput,
    index: int,
    *,
    is_last: bool,
) -> RequestOutput:
    choice = copy(output)
    choice.request_id = request_id
    choice.outputs = [replace(output.outputs[0], index=index)]
    choice.finished = is_last
    return choice


async def make_deferred_fields(output: RequestOutput, *names: str) -> None:
    """Make missing fields of an output, all unless ``names`` are given. Other tasks run between slices."""
    for completion in output.outputs:
        if isinstance(completion, DeferredCompletion):
            async with slice_limiter:
                for _ in completion.deferred.make_fields(completion, names or (TEXT, LOGPROBS, CUMULATIVE)):
                    await asyncio.sleep(0)


async def read_logprobs(completion: CompletionOutput) -> Sequence[float]:
    """Return the log-prob of each token of an output. Other tasks run between slices."""
    if isinstance(completion, DeferredCompletion):
        return sampled_logprobs(completion) or ()
    # vLLM's own outputs have a mapping for each token, with the log-probs of the likeliest tokens too.
    tokens = completion.token_ids
    logprobs = cast(Sequence[Mapping[int, Logprob]], completion.logprobs)
    values: list[float] = []
    for begin in range(0, len(tokens), SLICE):
        if begin:
            await asyncio.sleep(0)
        part = slice(begin, begin + SLICE)
        values += [by_token[token].logprob for token, by_token in zip(tokens[part], logprobs[part], strict=True)]
    return values


def sampled_logprobs(completion: CompletionOutput) -> Sequence[float] | None:
    """Return the log-prob of each token of a deferred output without making fields, or None if it has none."""
    assert isinstance(completion, DeferredCompletion)
    deferred = completion.deferred
    if deferred.token_logprobs is None or not deferred.returns_logprobs:
        return None
    return deferred.token_logprobs[: len(completion.token_ids)]
