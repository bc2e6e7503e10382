"""Defer the text and the log-probs of candidates until something reads them: of most nothing ever does.

While a candidate runs, its state in vLLM collects token ids, and log-probs as the engine sends them. vLLM's own
detokenizer of the request waits, and gets everything when the text of its output is read; vLLM's log-probs processor,
when its log-probs are. Each is made without the other: native routes read the text alone. So the results are vLLM's,
and a candidate that is discarded never costs what they take, nor does what is cut off.

The text of a request with stop strings is not deferred, since these are searched for in it as it grows, and neither is
anything of a candidate that goes on with earlier tokens (:func:`darts_server.vllm.prompt_request.begin_with`).
"""

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import anyio
import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.logprobs import append_logprobs_for_next_position
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import NONES, LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import LogprobsLists

from darts_server.types import FinishReason
from darts_server.vllm.outputs import new_detokenizer, token_logprobs

SLICE = 512
"""Tokens that are detokenized, and log-probs that are formatted, before others get a turn: some three milliseconds."""
TEXT, LOGPROBS = "text", ("logprobs", "cumulative_logprob")
INCOMPLETE = "\ufffd"
"""At the end of a token's text: the token ends within a character."""
CANDIDATE = "darts_candidate"
"""Name of the mark of a candidate's state."""
STOP = "stop"
"""vLLM's finish reason of an output whose last token may be no part of its text."""
Part: TypeAlias = Callable[[CompletionOutput], Iterator[None]]
"""Makes fields of an output, with a pause after each slice."""
StateChange = Callable[[RequestState], None]
_changes: ContextVar[list[StateChange] | None] = ContextVar("changes", default=None)
_one_at_a_time = anyio.CapacityLimiter(1)  # several tasks would each make a slice in every turn of the event loop


def change_new_states(processor: OutputProcessor) -> None:
    """Let `changing_state` work for requests that are added to this processor. Harmless if it does already.

    In the call that creates the state, because the first output may come before `AsyncLLM.add_request` returns.
    """
    if "add_request" in vars(processor):
        return
    add_request = processor.add_request

    def add_changed_request(request: EngineCoreRequest, *args: Any, **more: Any) -> None:
        add_request(request, *args, **more)
        if changes := _changes.get():
            state = processor.request_states[request.request_id]
            setattr(state, CANDIDATE, True)
            changes.pop()(state)

    processor.add_request = add_changed_request  # type: ignore[method-assign]  # of this one, not of its class


def is_candidate(state: RequestState) -> bool:
    """Whether a request is a candidate of a group."""
    return getattr(state, CANDIDATE, False)


@contextmanager
def changing_state(change: StateChange) -> Iterator[None]:
    """Call ``change`` with the new state of the request that this task adds in the block.

    Raises:
        RuntimeError: it was not called: this version of vLLM adds requests in another way.
    """
    changes = [change]  # emptied by the call: tasks of vLLM's that begin in the block keep this context
    token = _changes.set(changes)
    try:
        yield
    finally:
        _changes.reset(token)
    if changes:
        raise RuntimeError("vLLM has added a request without OutputProcessor.add_request, which its state depends on")


class CachingTokenizer:
    """A tokenizer that remembers the text of single tokens, which log-probs name again and again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._logprob_texts: dict[int, str] = {}

    def logprob_texts(self, token_ids: Collection[int]) -> Mapping[int, str]:
        """Return at least these tokens' texts as vLLM's log-probs have them, before it corrects incomplete ones."""
        missing = [token for token in token_ids if token not in self._logprob_texts]
        texts = convert_ids_list_to_tokens(cast(TokenizerLike, self), missing)
        self._logprob_texts.update(zip(missing, texts, strict=True))
        return self._logprob_texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) > 1:
            return str(self.tokenizer.decode(token_ids))
        (token,) = token_ids
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = self.tokenizer.decode(token_ids)
        return text


class CollectedLogprobs(LogprobsProcessor):
    """Collects the log-probs of generated tokens; those of the prompt are processed when they come, as vLLM does.

    ``processor``: what vLLM made for the request. ``tokenizer``: in place of the same one without a cache.
    """

    def __init__(self, processor: LogprobsProcessor, tokenizer: CachingTokenizer) -> None:
        super().__init__(**_fields(processor))
        if self.tokenizer is not None:
            self.tokenizer = cast(TokenizerLike, tokenizer)
        self._arrays: list[LogprobsLists] = []
        self._values = array("d")
        self._has_nan = False

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        arrays = each_array(logprobs_lists, np.array)  # copies, which do not keep the message that they came in
        self._arrays.append(arrays)
        sampled = arrays.logprobs[:, 0].astype(np.float64)  # the sampled token's is the first
        self._values.frombytes(sampled.tobytes())
        self._has_nan |= bool(np.isnan(sampled).any())

    def values(self) -> Sequence[float]:
        """The log-prob of each generated token so far."""
        return self._values

    def has_nan(self) -> bool:
        """Whether the log-prob of a generated token is NaN."""
        return self._has_nan

    def process(self, tokens: int | None, completion: CompletionOutput) -> Iterator[None]:
        """Process the log-probs of the first ``tokens`` tokens, or of all, as vLLM does, for an output of these."""
        left = len(self.values()) if tokens is None else tokens
        assert self.logprobs is not None
        empty = {"logprobs": type(self.logprobs)(), "cumulative_logprob": 0.0}
        processor = LogprobsProcessor(**(_fields(self) | empty))
        entries = 0
        for one in self._arrays:
            rows, step = min(left, len(one.logprobs)), max(1, SLICE // one.logprobs.shape[1])
            for start in range(0, rows, step):
                part = each_array(one, itemgetter(slice(start, min(start + step, rows))))
                self._format(part, processor)
                entries += part.logprobs.size
                if entries >= SLICE:
                    entries = 0
                    yield
            left -= rows
        completion.logprobs, completion.cumulative_logprob = processor.logprobs, processor.cumulative_logprob

    def _format(self, rows: LogprobsLists, processor: LogprobsProcessor) -> None:
        """Add log-probs to those of a processor, as its own method does, but without arrays of single tokens.

        A token that is a part of a character gets its text from those before it, which is left to vLLM.
        """
        token_ids = rows.logprob_token_ids.tolist()
        texts: Mapping[int, str] | None = None
        if self.tokenizer is not None:
            different = set(chain.from_iterable(token_ids))
            texts = cast(CachingTokenizer, self.tokenizer).logprob_texts(different)
            if any(texts[token].endswith(INCOMPLETE) for token in different):
                processor._update_sample_logprobs(rows)
                return
        assert processor.logprobs is not None
        assert processor.cumulative_logprob is not None
        assert processor.num_logprobs is not None
        for tokens, logprobs, rank in zip(
            token_ids, rows.logprobs.tolist(), rows.sampled_token_ranks.tolist(), strict=True
        ):
            processor.cumulative_logprob += logprobs[0]
            decoded = NONES if texts is None else [texts[token] for token in tokens]
            append_logprobs_for_next_position(
                processor.logprobs, tokens, logprobs, decoded, rank, processor.num_logprobs
            )


class Deferred:
    """What is deferred of one candidate's output.

    ``tokenizer``: decodes the tokens of log-probs. ``stop_strings``: whether the request has any, so that its text is
    not deferred. ``returns_logprobs``: whether the output has log-probs if the engine computes some.
    """

    def __init__(self, tokenizer: CachingTokenizer, *, stop_strings: bool, returns_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self.returns_logprobs = returns_logprobs
        self._detokenizer: IncrementalDetokenizer | None = None
        self._logprobs: CollectedLogprobs | None = None

    def begin(self, state: RequestState) -> None:
        """Let the candidate's state, which is new, collect only."""
        assert state.detokenizer is not None
        assert state.logprobs_processor is not None
        if not self._stop_strings:
            self._detokenizer, state.detokenizer = state.detokenizer, IncrementalDetokenizer()
        if state.logprobs_processor.logprobs is not None:
            self._logprobs = CollectedLogprobs(state.logprobs_processor, self._tokenizer)
            state.logprobs_processor = self._logprobs

    def logprobs(self) -> Sequence[float] | None:
        """Return the log-prob of each token generated so far; ``None`` if the engine computes none."""
        return None if self._logprobs is None else self._logprobs.values()

    def has_nan(self) -> bool:
        """Whether the log-prob of a token generated so far is NaN."""
        return self._logprobs is not None and self._logprobs.has_nan()

    def output(self, collected: RequestOutput) -> RequestOutput:
        """Return the candidate's output. Called once."""
        (completion,) = collected.outputs
        detokenizer, self._detokenizer = self._detokenizer, None
        text = None if detokenizer is None else partial(_detokenize, lambda: detokenizer)
        returned = self._logprobs if self.returns_logprobs else None
        changes = {} if self.returns_logprobs else dict.fromkeys(LOGPROBS)
        output = copy(collected)
        output.outputs = [DeferredCompletion.of(completion, text, returned, changes)]
        return output


class DeferredCompletion(CompletionOutput):
    """vLLM's output of a candidate, without the fields that are deferred until they are read."""

    collected: CollectedLogprobs | None = None
    """The log-probs of its tokens, and maybe of more, if they are deferred."""
    _parts: Mapping[str, Part] = MappingProxyType({})
    _making: dict[Part, Iterator[None] | Exception]

    @classmethod
    def of(
        cls,
        completion: CompletionOutput,
        text: Part | None,
        collected: CollectedLogprobs | None,
        changes: Mapping[str, Any],
        tokens: int | None = None,
    ) -> "DeferredCompletion":
        """Copy an output with changes, and defer its text and log-probs, these of the first ``tokens`` tokens.

        ``None`` for ``text`` or ``collected``: that is not deferred.
        """
        parts: dict[str, Part] = {} if text is None else {TEXT: text}
        if collected is not None:
            parts |= dict.fromkeys(LOGPROBS, partial(collected.process, tokens))
        made = cls.__new__(cls)
        vars(made).update({name: value for name, value in vars(completion).items() if name not in parts})
        vars(made).update(changes, collected=collected, _parts=parts, _making={})
        return made

    # In place of fields of the base class: one that is missing is made, also if vLLM gives it a default.
    text = cached_property(lambda self: self._read("text"))
    logprobs = cached_property(lambda self: self._read("logprobs"))
    cumulative_logprob = cached_property(lambda self: self._read("cumulative_logprob"))

    def _read(self, name: str) -> Any:
        for _ in self.make(name):
            pass
        return vars(self)[name]

    def make(self, *names: str) -> Iterator[None]:
        """Make fields, or all, if they are deferred, with a pause after each slice; may be left, and called again.

        What cannot be made raises the same error each time.
        """
        for name in names or (TEXT, *LOGPROBS):
            part = self._parts.get(name)
            if part is None or name in vars(self):
                continue
            making = self._making.setdefault(part, part(self))
            if isinstance(making, Exception):
                raise making
            try:
                for _ in making:  # not `yield from`, which would close it with this one
                    yield
            except Exception as error:
                self._making[part] = error
                raise
            self._making.pop(part, None)
            self._parts = {other: made for other, made in self._parts.items() if made is not part}  # frees what it has


def truncate_output(
    output: RequestOutput, tokens: int, params: SamplingParams, tokenizer: TokenizerLike | None
) -> RequestOutput:
    """Truncate an output as if ``tokens`` had been its ``max_tokens``: ids, log-probs, text and finish reason.

    What is deferred of it stays so, and its text is deferred in any case.
    """
    whole = output.outputs[0]
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
    collected = whole.collected if isinstance(whole, DeferredCompletion) else None
    if collected is None and whole.logprobs is not None:
        changes["logprobs"] = whole.logprobs[:tokens]
        changes["cumulative_logprob"] = sum(token_logprobs(changes["logprobs"], changes["token_ids"]))
    # Decoding all tokens at once can give another text, for example around special tokens and incomplete characters.
    new = partial(new_detokenizer, output.prompt_token_ids or [], params, tokenizer)
    copied = copy(output)
    copied.outputs = [DeferredCompletion.of(whole, partial(_detokenize, new), collected, changes, tokens)]
    return copied


async def make_deferred(output: RequestOutput, *names: str) -> None:
    """Make fields of an output, or all, if they are deferred, and let other tasks have their turns meanwhile."""
    for completion in output.outputs:
        if isinstance(completion, DeferredCompletion):
            async with _one_at_a_time:
                for _ in completion.make(*names):
                    await asyncio.sleep(0)


def sampled_logprobs(completion: CompletionOutput) -> Sequence[float] | None:
    """Return the log-prob of each generated token of an output; ``None`` if it has none. Makes nothing deferred."""
    if isinstance(completion, DeferredCompletion) and completion.collected is not None:
        return completion.collected.values()[: len(completion.token_ids)]
    logprobs = completion.logprobs
    return None if logprobs is None else token_logprobs(logprobs, completion.token_ids)


def _detokenize(new: Callable[[], IncrementalDetokenizer], completion: CompletionOutput) -> Iterator[None]:
    """Detokenize an output incrementally, as vLLM does while it generates."""
    detokenizer = new()
    tokens, has_stop = list(completion.token_ids), completion.finish_reason == STOP
    for start in range(0, len(tokens), SLICE):
        end = start + SLICE
        if detokenizer.update(tokens[start:end], has_stop and end >= len(tokens)) is not None:
            break  # what it has generated after a stop string, in the same step, is no part of its text
        yield
    completion.text = detokenizer.get_next_output_text(finished=True, delta=False)


def _fields(processor: LogprobsProcessor) -> dict[str, Any]:
    return {field.name: getattr(processor, field.name) for field in fields(LogprobsProcessor)}


def each_array(logprobs: LogprobsLists, change: Callable[[NDArray[Any]], NDArray[Any]]) -> LogprobsLists:
    """Return log-probs with their arrays changed in the same way."""
    return LogprobsLists(
        change(logprobs.logprob_token_ids), change(logprobs.logprobs), change(logprobs.sampled_token_ranks)
    )
