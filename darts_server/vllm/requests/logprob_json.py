"""Write the log-probs of answers as JSON, from the engine's arrays, without an object for each token.

The bytes are those that vLLM's routes would send: the same fields, texts, order and numbers.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from math import isfinite
from typing import Any, ClassVar, cast

import numpy as np
from vllm.entrypoints.generate.base.serving import format_token_id_placeholder
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput

from darts_server.vllm.requests.outputs import (
    LOGPROBS,
    TEXT,
    DeferredCompletion,
    LogprobRows,
    make_deferred,
)

MIN_LOGPROB = -9999.0
"""OpenAI's number for a log-prob of minus infinity, which JSON does not have."""
CACHED_TEXTS = 1 << 18
"""More than the tokens of a vocabulary. Each entry has some hundred bytes."""


class ArrayLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probs of an output as the engine's arrays. vLLM's objects are made when an entry is read."""

    def __init__(self, completion: DeferredCompletion) -> None:
        # Not the output, which refers to this object.
        self.deferred = completion.deferred
        self.token_ids = completion.token_ids
        self._made: Any = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            building = self.deferred.build_logprobs(self.token_ids)
            try:
                while True:
                    next(building)
            except StopIteration as end:
                self._made = end.value
        return self._made[index]


async def make_text_and_keep_arrays(output: RequestOutput) -> None:
    """Make the text of a deferred output. The log-probs stay arrays, for a route that writes them as JSON."""
    await make_deferred(output, TEXT)
    for completion in output.outputs:
        if isinstance(completion, DeferredCompletion) and LOGPROBS not in vars(completion):
            completion.logprobs = ArrayLogprobs(completion)


class Form(ABC):
    """A route's form of log-probs: an object of lists. ``fields``: names of the lists."""

    fields: ClassVar[tuple[str, ...]] = ("content",)
    needs_texts: ClassVar[bool] = True

    @abstractmethod
    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        """Return the entries of each list for some tokens."""


def write_slices(logprobs: ArrayLogprobs, form: Form) -> Iterator[str]:
    """Write the JSON of log-probs. Yield an empty text after each slice, and the JSON at the end.

    Raises:
        ValueError: a log-prob is NaN.
    """
    slices = []
    for rows in logprobs.deferred.logprob_rows(logprobs.token_ids):
        slices.append(form.write(rows))
        yield ""
    lists = zip(*slices, strict=True) if slices else [()] * len(form.fields)
    yield "{" + ",".join(f'"{name}":[{",".join(parts)}]' for name, parts in zip(form.fields, lists, strict=True)) + "}"


@dataclass
class CompletionForm(Form):
    """Log-probs of ``/v1/completions``.

    ``count``: number of top log-probs of each token, of which the sampled token's is the first, or None for all.
    ``as_token_ids``: whether tokens are named by their ids.
    """

    count: int | None
    as_token_ids: bool
    fields = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    _offset: int = 0

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names = name_tokens(rows, as_token_ids=self.as_token_ids)
        numbers = write_numbers(rows.values)
        offsets = list(accumulate((len(row[0]) for row in names), initial=self._offset))
        self._offset = offsets.pop()

        tokens = [quote(row[0]) for row in names]
        values = [row[0] for row in numbers]
        if rows.values.shape[1] == 1:
            tops = [f"{{{token}:{value}}}" for token, value in zip(tokens, values, strict=True)]
        else:
            tops = []
            for ids, texts, row in zip(rows.ids, names, numbers, strict=True):
                chosen = take(ids, zip(texts, row, strict=True), self.count)
                # Several tokens may have the same text. The last token's log-prob counts.
                tops.append("{" + ",".join(f"{quote(text)}:{value}" for text, value in dict(chosen).items()) + "}")
        return ",".join(map(str, offsets)), ",".join(values), ",".join(tokens), ",".join(tops)


@dataclass
class ChatForm(Form):
    """Log-probs of ``/v1/chat/completions``, with the fields of `CompletionForm`."""

    count: int | None
    as_token_ids: bool

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names = name_tokens(rows, as_token_ids=self.as_token_ids)
        entries = []
        for ids, texts, token_names, row in zip(rows.ids, rows.texts, names, write_numbers(rows.values), strict=True):
            chosen = take(ids, zip(token_names, row, strict=True), self.count)
            tops = ",".join(
                f'{{"token":{quote(name)},"logprob":{value},"bytes":{write_bytes(name)}}}' for name, value in chosen
            )
            # The bytes are those of the text, even if the token is named by its id.
            text = cast(str, next(iter(texts)))
            entries.append(
                f'{{"token":{quote(token_names[0])},"logprob":{row[0]},"bytes":{write_bytes(text)},'
                f'"top_logprobs":[{tops}]}}'
            )
        return (",".join(entries),)


@dataclass
class TokensForm(Form):
    """Log-probs of ``/inference/v1/generate``, which names tokens by their ids. ``count``: as in `CompletionForm`."""

    count: int | None
    needs_texts = False

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names = name_tokens(rows, as_token_ids=True)
        entries = []
        for ids, row_names, row in zip(rows.ids, names, write_numbers(rows.values), strict=True):
            chosen = take(ids, zip(row_names, row, strict=True), self.count)
            tops = ",".join(f'{{"token":"{name}","logprob":{value},"bytes":null}}' for name, value in chosen)
            entries.append(f'{{"token":"{row_names[0]}","logprob":{row[0]},"bytes":null,"top_logprobs":[{tops}]}}')
        return (",".join(entries),)


def take(ids: Sequence[int], entries: Iterable[tuple[str, str]], count: int | None) -> Iterable[tuple[str, str]]:
    """Return the first ``count`` entries, or all for None, of a token's row without repeated ids."""
    return islice(dict(zip(ids, entries, strict=True)).values(), count)


def name_tokens(rows: LogprobRows, *, as_token_ids: bool) -> list[list[str]]:
    if as_token_ids:
        return [[format_token_id_placeholder(token) for token in row] for row in rows.ids]
    return cast(list[list[str]], rows.texts)


def write_numbers(values: Any) -> list[list[str]]:
    """Write log-probs as Python's JSON does."""
    raised = np.maximum(values, MIN_LOGPROB)
    if not np.isfinite(raised).all():
        number = next(number for number in raised.ravel().tolist() if not isfinite(number))
        raise ValueError(f"Out of range float values are not JSON compliant: {number}")
    return [[repr(value) for value in row] for row in raised.tolist()]


@lru_cache(CACHED_TEXTS)
def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache(CACHED_TEXTS)
def write_bytes(text: str) -> str:
    return json.dumps(list(text.encode("utf-8", errors="replace")), separators=(",", ":"))
