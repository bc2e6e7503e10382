"""Make text and log-probs of candidates' outputs when something reads them: of most nothing ever does.

While a candidate runs, its state in vLLM collects token ids, and log-probs as the engine sends them. vLLM's detokenizer
gets the tokens when the text of its output is read; vLLM's log-probs are made when they are read. Each is made without
the other: native routes read the text alone. So the results are vLLM's, and a candidate that is discarded never costs
what they take, nor does what is cut off. A candidate that goes on with earlier tokens begins with these.

Only the text of a request with stop strings is made as it grows, since these are searched for in it.
"""

import asyncio
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, cast

import anyio
import numpy as np
from msgspec import structs
from vllm import SamplingParams
from vllm.logprobs import Logprob, append_logprobs_for_next_position
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import NONES, LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsLists

from darts_server.engine.port import NOTHING, TokenSlice
from darts_server.types import FinishReason

SLICE = 512
"""Tokens that are detokenized, and log-probs that are formatted, before others get a turn: some three milliseconds."""
TEXT, LOGPROBS = "text", ("logprobs", "cumulative_logprob")
INCOMPLETE = "\ufffd"  # in a token's text: the token has a part of a character
ABORTED = "abort"  # vLLM's finish reason of requests that were aborted
STOP = "stop"  # vLLM's finish reason of an output whose last token may be no part of its text
_one_at_a_time = anyio.CapacityLimiter(1)  # several tasks would each make a slice in every turn of the event loop


class NoTokens(list[int]):
    """The tokens of a stream's last output that has none: an empty list that counts as true.

    vLLM's stream generators skip an output whose tokens are false, and its finish reason with it.
    """

    def __bool__(self) -> bool:
        return True


class CachingTokenizer:
    """A tokenizer that remembers the text of single tokens, which log-probs name again and again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decode = cache(lambda token: tokenizer.decode([token]))
        self.text = cache(self._text)
        self.incomplete: set[int] = set()  # of the tokens whose text was returned, those with a part of a character

    def _text(self, token: int) -> str:
        """Return a token's text as vLLM's log-probs have it, before it corrects incomplete ones."""
        (text,) = convert_ids_list_to_tokens(cast(TokenizerLike, self), [token])
        if INCOMPLETE in text:
            self.incomplete.add(token)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids) if len(token_ids) > 1 else self._decode(*token_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class Deferred:
    """What the output of one candidate is made from.

    Args:
        tokenizer: the model's.
        params: of the candidate, as if it had not been stopped.
        prefix: tokens that it had generated before, which the engine gets as the end of its prompt.
        returns_logprobs: whether its output has log-probs if the engine computes some.
    """

    def __init__(
        self,
        tokenizer: CachingTokenizer,
        params: SamplingParams,
        prefix: TokenSlice = NOTHING,
        *,
        returns_logprobs: bool = True,
    ) -> None:
        self._params, self._prefix = params, prefix
        self._tokenizer = tokenizer if params.detokenize and tokenizer.tokenizer is not None else None
        self._detokenizer: IncrementalDetokenizer | None = None
        self._arrays: list[LogprobsLists] = []
        self.returns_logprobs = returns_logprobs
        self.values: array[float] | None = None
        """The log-prob of each token generated so far; ``None`` if the engine computes none."""

    def begin(self, request: EngineCoreRequest, state: RequestState) -> None:
        """Let the state of the candidate's request, which is new, collect only, after what was generated before.

        The engine gets the prompt with the earlier tokens, most of which its prefix cache may have. The output is that
        of a request that was never stopped, also where a stop string or a character has tokens on both sides.
        """
        before = list(self._prefix.token_ids)
        if before:
            assert request.prompt_token_ids is not None
            state.prompt_token_ids = request.prompt_token_ids[: -len(before)]
        # What vLLM makes a detokenizer and log-probs from; not what may be large, as images.
        embeds = request.prompt_embeds  # of which a detokenizer needs the length alone
        tokens = state.prompt_token_ids or ([] if embeds is None else [0] * len(embeds))
        changes: dict[str, Any] = {"prompt_token_ids": tokens, "prompt_embeds": None, "mm_features": None}
        self._request = structs.replace(request, sampling_params=self._params, **changes)
        if not self._params.stop:
            self._detokenizer, state.detokenizer = None if before else state.detokenizer, IncrementalDetokenizer()
        elif before:
            state.detokenizer = self._new_detokenizer()
        if before:
            assert state.detokenizer is not None
            state.detokenizer.update(before, False)
        assert state.logprobs_processor is not None
        if state.logprobs_processor.logprobs is not None:
            self.values = array("d", self._prefix.logprobs or ())
            # Of this one, not of its class. Those of the prompt are processed when they come, as vLLM does.
            state.logprobs_processor._update_sample_logprobs = self._collect  # type: ignore[method-assign]

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        tokenizer = None if self._tokenizer is None else self._tokenizer.tokenizer
        return IncrementalDetokenizer.from_new_request(tokenizer, self._request)

    def _collect(self, logprobs_lists: LogprobsLists) -> None:
        # Copies, which do not keep the message that they came in.
        token_ids, logprobs, ranks = logprobs_lists[:3]
        self._arrays.append(LogprobsLists(token_ids.copy(), logprobs.copy(), ranks.copy()))
        assert self.values is not None
        self.values.frombytes(logprobs[:, 0].astype(np.float64).tobytes())  # the sampled token's is the first

    def output(self, collected: RequestOutput, later: Collection[str] | None = None, **changes: Any) -> RequestOutput:
        """Return the output of the candidate, which has finished, with changes.

        ``later``: fields that are made when they are read, beside log-probs; ``None``: the text, unless it grew with
        the tokens.
        """
        if later is None:
            later = [] if self._params.stop else [TEXT]
        if self.values is not None and self.returns_logprobs:
            later = [*later, *LOGPROBS]
        completion = DeferredCompletion.__new__(DeferredCompletion)
        fields = vars(completion)
        fields.update(vars(collected.outputs[0]), logprobs=None, cumulative_logprob=None, **changes, deferred=self)
        for name in later:
            fields.pop(name, None)
        changed = copy(collected)
        changed.outputs = [completion]
        return changed

    def make_output(self, prompt: Any, finish_reason: str = ABORTED, text: str | None = None) -> RequestOutput:
        """Make the output of a candidate whose tokens are those that were generated before, if there are some.

        Without ``text``: that of the tokens.
        """
        token_ids = list(self._prefix.token_ids)
        inputs: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        prompt_token_ids = inputs.get("prompt_token_ids") or []
        self._request = EngineCoreRequest("made", prompt_token_ids, None, self._params, None, 0.0, None, None, None)
        self.values = None if self._params.logprobs is None else array("d", self._prefix.logprobs or ())
        completion = CompletionOutput(0, text or "", token_ids, None, None, finish_reason=finish_reason)
        # `to_choice` sets the caller's id.
        output = RequestOutput("made", inputs.get("prompt"), prompt_token_ids, None, [completion], finished=True)
        return self.output(output, [TEXT] if text is None and token_ids else [])

    def make(self, completion: "DeferredCompletion", names: Iterable[str]) -> Iterator[None]:
        """Make fields of an output of the candidate, or of one that was truncated, with a pause after each slice."""
        for name in names:
            if name in vars(completion):
                continue
            if name != TEXT:
                yield from self._make_logprobs(completion)
                continue
            # Incrementally, as vLLM detokenizes while it generates: decoding all tokens at once can give another text,
            # for example around special tokens and incomplete characters.
            detokenizer, self._detokenizer = self._detokenizer or self._new_detokenizer(), None
            tokens, has_stop = list(completion.token_ids), completion.finish_reason == STOP
            for start in range(0, len(tokens), SLICE):
                end = start + SLICE
                if detokenizer.update(tokens[start:end], has_stop and end >= len(tokens)) is not None:
                    break  # what it has generated after a stop string, in the same step, is no part of its text
                yield
            completion.text = detokenizer.get_next_output_text(finished=True, delta=False)

    def _make_logprobs(self, completion: CompletionOutput) -> Iterator[None]:
        """Make log-probs as vLLM's processor does, but without arrays of single tokens, and each text but once."""
        processor = LogprobsProcessor.from_new_request(cast(TokenizerLike | None, self._tokenizer), self._request)
        logprobs, caching = processor.logprobs, self._tokenizer
        text, incomplete = (None, set[int]()) if caching is None else (caching.text, caching.incomplete)
        assert logprobs is not None
        assert processor.cumulative_logprob is not None
        assert processor.num_logprobs is not None
        left, entries = len(completion.token_ids), 0
        for token, value in zip(self._prefix.token_ids[:left], self._prefix.logprobs or (), strict=False):
            logprobs.append({token: Logprob(value)})
            processor.cumulative_logprob += value
        left -= len(logprobs)
        for arrays in self._arrays:
            rows, step = min(left, len(arrays.logprobs)), max(1, SLICE // arrays.logprobs.shape[1])
            left -= rows
            for start in range(0, rows, step):
                part = rows_of(arrays, start, min(start + step, rows))
                ids, values, ranks = part.logprob_token_ids.tolist(), part.logprobs.tolist(), part.sampled_token_ranks
                for row, (tokens, of_tokens, rank) in enumerate(zip(ids, values, ranks.tolist(), strict=True)):
                    texts = NONES if text is None else [text(token) for token in tokens]
                    if not incomplete.isdisjoint(tokens):  # vLLM corrects their texts by the tokens before
                        processor._update_sample_logprobs(rows_of(part, row, row + 1))
                        continue
                    append_logprobs_for_next_position(logprobs, tokens, of_tokens, texts, rank, processor.num_logprobs)
                    processor.cumulative_logprob += of_tokens[0]
                entries += part.logprobs.size
                if entries >= SLICE:
                    entries = 0
                    yield
        completion.logprobs, completion.cumulative_logprob = logprobs, processor.cumulative_logprob


def rows_of(arrays: LogprobsLists, start: int, end: int) -> LogprobsLists:
    token_ids, logprobs, ranks = arrays[:3]
    return LogprobsLists(token_ids[start:end], logprobs[start:end], ranks[start:end])


class DeferredCompletion(CompletionOutput):
    """vLLM's output of a candidate, without the fields that are made when they are read."""

    deferred: Deferred

    # In place of fields of the base class: one that is missing is made, also if vLLM gives it a default.
    text = cached_property(lambda self: self._read(TEXT))
    logprobs = cached_property(lambda self: self._read("logprobs"))
    cumulative_logprob = cached_property(lambda self: self._read("cumulative_logprob"))

    def _read(self, name: str) -> Any:
        for _ in self.deferred.make(self, [name]):
            pass
        return vars(self)[name]


def truncate_output(output: RequestOutput, tokens: int) -> RequestOutput:
    """Truncate an output as if ``tokens`` had been its ``max_tokens``: ids, log-probs, text and finish reason."""
    (whole,) = output.outputs
    assert isinstance(whole, DeferredCompletion)
    changes: dict[str, Any] = {
        "token_ids": list(whole.token_ids[:tokens]),
        "finish_reason": FinishReason.LENGTH.value,
        "stop_reason": None,
    }
    if whole.sampling_mask is not None:
        changes["sampling_mask"] = replace(whole.sampling_mask, token_ids=whole.sampling_mask.token_ids[:tokens])
    if (experts := whole.routed_experts) is not None:  # those of the prompt first
        changes["routed_experts"] = experts[: len(experts) - max(0, len(whole.token_ids) - tokens)]
    if (spans := getattr(whole, "weight_versions", None)) is not None:  # since 0.32
        changes["weight_versions"] = [replace(one, end=min(one.end, tokens)) for one in spans if one.start < tokens]
    return whole.deferred.output(output, [TEXT], **changes)


def to_choice(request_id: str, output: RequestOutput, index: int, *, last: bool) -> RequestOutput:
    """Copy a candidate's output as choice ``index`` of the caller's request. ``last``: it finishes the request."""
    choice = copy(output)
    choice.request_id = request_id
    choice.outputs = [replace(output.outputs[0], index=index)]
    choice.finished = last
    return choice


async def make_deferred(output: RequestOutput, *names: str) -> None:
    """Make fields of an output, or all, if they are deferred, and let other tasks have their turns meanwhile."""
    for completion in output.outputs:
        if isinstance(completion, DeferredCompletion):
            async with _one_at_a_time:
                for _ in completion.deferred.make(completion, names or (TEXT, *LOGPROBS)):
                    await asyncio.sleep(0)


def sampled_logprobs(completion: CompletionOutput) -> Sequence[float] | None:
    """Return the log-prob of each generated token of a candidate's output; ``None`` if it has none. Makes nothing."""
    assert isinstance(completion, DeferredCompletion)
    values = completion.deferred.values if completion.deferred.returns_logprobs else None
    return None if values is None else values[: len(completion.token_ids)]
