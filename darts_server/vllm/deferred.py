"""Defer the text and the log-probs of candidates until something reads them: of most nothing ever does.

While a candidate runs, its state in vLLM collects token ids, and log-probs as the engine sends them. vLLM's own
detokenizer and log-probs processor of the request wait, and get everything at once when the text or the log-probs of
its output are read. So the results are vLLM's, and a candidate that is discarded never costs what they take.

The text of a request with stop strings is not deferred, since these are searched for in it as it grows, and neither is
anything of a candidate that goes on with earlier tokens (:mod:`darts_server.vllm.resume`).
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields
from operator import itemgetter
from typing import Any, cast

from msgspec import Raw
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsLists

from darts_server.vllm.outputs import token_logprobs
from darts_server.vllm.packed_outputs import NOTHING, copied, each_array, unpack

SLICE = 512
"""Tokens that are detokenized, and log-probs that are formatted, before others get a turn: some three milliseconds."""
LOGPROBS = ["logprobs", "cumulative_logprob"]
STOP = "stop"
"""vLLM's finish reason of an output whose last token may be no part of its text."""


class CachingTokenizer:
    """A tokenizer that remembers the text of single tokens, which log-probs name each time anew."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

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
        super().__init__(**{field.name: getattr(processor, field.name) for field in fields(processor)})
        if self.tokenizer is not None:
            self.tokenizer = cast(TokenizerLike, tokenizer)
        self._packed, self._packed_outputs = bytearray(), 0
        self._arrays: list[LogprobsLists] = []
        self._values = array("d")

    def update_from_output(self, output: EngineCoreOutput) -> None:
        packed = getattr(output, "packed_logprobs", None)
        if isinstance(packed, Raw):
            if (data := bytes(packed)) not in NOTHING:
                self._packed += data
                self._packed_outputs += 1
            output.packed_logprobs = None  # type: ignore[attr-defined]
        super().update_from_output(output)

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        self._unpack()
        self._add(copied(logprobs_lists))

    def values(self) -> Sequence[float]:
        """The log-prob of each generated token so far."""
        self._unpack()
        return self._values

    def process(self) -> Iterator[None]:
        """Process everything collected as vLLM does, with a pause after each slice. Called once, at the end."""
        self._unpack()
        arrays, self._arrays = self._arrays, []
        for one in arrays:
            tokens = max(1, SLICE // one.logprobs.shape[1])
            for start in range(0, len(one.logprobs), tokens):
                part = slice(start, start + tokens)
                super()._update_sample_logprobs(each_array(one, itemgetter(part)))
                yield

    def _unpack(self) -> None:
        if self._packed_outputs:
            packed, outputs = self._packed, self._packed_outputs
            self._packed, self._packed_outputs = bytearray(), 0
            for one in unpack(packed, outputs):
                self._add(one)

    def _add(self, arrays: LogprobsLists) -> None:
        self._arrays.append(arrays)
        self._values.extend(arrays.logprobs[:, 0].tolist())  # the sampled token's is the first


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
            self._detokenizer, state.detokenizer = state.detokenizer, IncrementalDetokenizer()  # type: ignore[no-untyped-call]
        if state.logprobs_processor.logprobs is not None:
            self._logprobs = CollectedLogprobs(state.logprobs_processor, self._tokenizer)
            state.logprobs_processor = self._logprobs

    @property
    def names(self) -> Sequence[str]:
        """Fields of the output that are made when they are read."""
        names = [] if self._detokenizer is None else ["text"]
        return names + LOGPROBS if self._logprobs is not None and self.returns_logprobs else names

    def logprobs(self) -> Sequence[float] | None:
        """Return the log-prob of each token generated so far; ``None`` if the engine computes none."""
        return None if self._logprobs is None else self._logprobs.values()

    def output(self, collected: RequestOutput) -> RequestOutput:
        """Return the candidate's output."""
        output = copy(collected)
        output.outputs = [DeferredCompletion.of(completion, self) for completion in collected.outputs]
        return output

    def make(self, completion: CompletionOutput) -> Iterator[None]:
        """Make the missing fields of the output, with a pause after each slice. Called once."""
        if self._detokenizer is not None:
            tokens, has_stop = list(completion.token_ids), completion.finish_reason == STOP
            for start in range(0, len(tokens), SLICE):
                end = start + SLICE
                self._detokenizer.update(tokens[start:end], has_stop and end >= len(tokens))
                yield
            completion.text = self._detokenizer.get_next_output_text(finished=True, delta=False)
        if self._logprobs is not None and self.returns_logprobs:
            yield from self._logprobs.process()
            completion.logprobs = self._logprobs.logprobs
            completion.cumulative_logprob = self._logprobs.cumulative_logprob


class DeferredCompletion(CompletionOutput):
    """vLLM's output of a candidate, without the fields that are deferred until one of them is read."""

    _deferred: Deferred
    _making: Iterator[None] | None = None

    @classmethod
    def of(cls, completion: CompletionOutput, deferred: Deferred) -> "DeferredCompletion":
        made = cls.__new__(cls)
        vars(made).update(vars(completion), _deferred=deferred)
        if not deferred.returns_logprobs:
            made.logprobs = made.cumulative_logprob = None
        for name in deferred.names:
            del vars(made)[name]
        return made

    def __getattr__(self, name: str) -> Any:  # called only for what is missing
        deferred = vars(self).get("_deferred")
        if deferred is None or name not in deferred.names:
            raise AttributeError(name)
        for _ in self.make():
            pass
        return vars(self)[name]

    def make(self) -> Iterator[None]:
        """Make what was deferred, with a pause after each slice; may be left, and called again."""
        if "_deferred" in vars(self) and any(name not in vars(self) for name in self._deferred.names):
            if self._making is None:
                self._making = self._deferred.make(self)
            for _ in self._making:  # not `yield from`, which would close it with this one
                yield
            self._making = None


async def make_deferred(output: RequestOutput) -> None:
    """Make what was deferred of an output, and let other tasks have their turns meanwhile."""
    for completion in output.outputs:
        if isinstance(completion, DeferredCompletion):
            for _ in completion.make():
                await asyncio.sleep(0)


def sampled_logprobs(completion: CompletionOutput) -> Sequence[float] | None:
    """Return the log-prob of each generated token of an output; ``None`` if it has none. Makes nothing deferred."""
    deferred: Deferred | None = vars(completion).get("_deferred")
    if deferred is not None and deferred.returns_logprobs:
        return deferred.logprobs()
    logprobs = completion.logprobs
    return None if logprobs is None else token_logprobs(logprobs, completion.token_ids)
