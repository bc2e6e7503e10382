"""Write the log-probs of answers as JSON from the engine's arrays, with the bytes that vLLM's routes would send."""

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
    make_deferred_fields,
)

MIN_LOGPROB = -9999.0
"""OpenAI's number for a log-prob of minus infinity, which JSON does not have."""
CACHED_TEXTS = 1 << 18
"""More than the tokens of a vocabulary. Each entry has some hundred bytes."""


class ArrayLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probs of an output, whose objects are made when an entry is read."""

    def __init__(self, completion: DeferredCompletion) -> None:
        # Not the output, which refers to this object.
        self.deferred = completion.deferred
        self.token_ids = completion.token_ids
        self._logprobs: Any = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        if self._logprobs is None:
            # The generator yields where other tasks may run, and returns the log-probs.
            building = self.deferred.build_logprobs(self.token_ids)
            try:
                while True:
                    next(building)
            except StopIteration as end:
                self._logprobs = end.value
        return self._logprobs[index]


async def make_text_and_keep_arrays(output: RequestOutput) -> None:
    await make_deferred_fields(output, TEXT)
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
    # Each slice has a part of every list.
    parts_by_field = zip(*slices, strict=True) if slices else [()] * len(form.fields)
    lists = [f'"{name}":[{",".join(parts)}]' for name, parts in zip(form.fields, parts_by_field, strict=True)]
    yield "{" + ",".join(lists) + "}"


@dataclass
class CompletionForm(Form):
    """Log-probs of ``/v1/completions``.

    ``max_tops``: limit of log-probs of each token, including the sampled token's, or None for all. ``as_token_ids``:
    whether tokens are named by their ids.
    """

    max_tops: int | None
    as_token_ids: bool
    fields = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    _offset: int = 0

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names_by_row = name_tokens(rows, as_token_ids=self.as_token_ids)
        values_by_row = write_numbers(rows.values)
        sampled_names = [names[0] for names in names_by_row]
        # The last sum is the offset of the next slice.
        offsets = list(accumulate(map(len, sampled_names), initial=self._offset))
        self._offset = offsets.pop()

        tokens = [quote(name) for name in sampled_names]
        values = [row_values[0] for row_values in values_by_row]
        if rows.values.shape[1] == 1:
            tops = [f"{{{token}:{value}}}" for token, value in zip(tokens, values, strict=True)]
        else:
            tops = []
            for ids, names, row_values in zip(rows.ids, names_by_row, values_by_row, strict=True):
                entries = take_distinct(ids, zip(names, row_values, strict=True), self.max_tops)
                # Several tokens may have the same text. The last token's log-prob counts.
                value_of_text = dict(entries)
                tops.append("{" + ",".join(f"{quote(text)}:{value}" for text, value in value_of_text.items()) + "}")
        return ",".join(map(str, offsets)), ",".join(values), ",".join(tokens), ",".join(tops)


@dataclass
class ChatForm(Form):
    """Log-probs of ``/v1/chat/completions``, with the fields of `CompletionForm`."""

    max_tops: int | None
    as_token_ids: bool

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names_by_row = name_tokens(rows, as_token_ids=self.as_token_ids)
        values_by_row = write_numbers(rows.values)
        entries = []
        for ids, texts, names, values in zip(rows.ids, rows.texts, names_by_row, values_by_row, strict=True):
            chosen = take_distinct(ids, zip(names, values, strict=True), self.max_tops)
            tops = ",".join(
                f'{{"token":{quote(name)},"logprob":{value},"bytes":{write_bytes(name)}}}' for name, value in chosen
            )
            # The sampled token's bytes are those of its text, even if the token is named by its id.
            sampled_text = cast(str, next(iter(texts)))
            entries.append(
                f'{{"token":{quote(names[0])},"logprob":{values[0]},"bytes":{write_bytes(sampled_text)},'
                f'"top_logprobs":[{tops}]}}'
            )
        return (",".join(entries),)


@dataclass
class TokensForm(Form):
    """Log-probs of ``/inference/v1/generate``, which names tokens by their ids. ``max_tops``: see `CompletionForm`."""

    max_tops: int | None
    needs_texts = False

    def write(self, rows: LogprobRows) -> tuple[str, ...]:
        names_by_row = name_tokens(rows, as_token_ids=True)
        values_by_row = write_numbers(rows.values)
        entries = []
        for ids, names, values in zip(rows.ids, names_by_row, values_by_row, strict=True):
            chosen = take_distinct(ids, zip(names, values, strict=True), self.max_tops)
            tops = ",".join(f'{{"token":"{name}","logprob":{value},"bytes":null}}' for name, value in chosen)
            entries.append(f'{{"token":"{names[0]}","logprob":{values[0]},"bytes":null,"top_logprobs":[{tops}]}}')
        return (",".join(entries),)


def take_distinct(
    ids: Sequence[int],
    entries: Iterable[tuple[str, str]],
    limit: int | None,
) -> Iterable[tuple[str, str]]:
    """Return the first entries of a row without repeated ids, at most ``limit`` unless it is None."""
    # The sampled token comes first, and again if it is one of the likeliest.
    entry_of_id = dict(zip(ids, entries, strict=True))
    return islice(entry_of_id.values(), limit)


def name_tokens(rows: LogprobRows, *, as_token_ids: bool) -> list[list[str]]:
    if as_token_ids:
        return [[format_token_id_placeholder(token) for token in row] for row in rows.ids]
    return cast(list[list[str]], rows.texts)


def write_numbers(values: Any) -> list[list[str]]:
    finite = np.maximum(values, MIN_LOGPROB)
    if not np.isfinite(finite).all():
        wrong = next(value for value in finite.ravel().tolist() if not isfinite(value))
        # The error of `json.dumps`, which vLLM would raise.
        raise ValueError(f"Out of range float values are not JSON compliant: {wrong}")
    return [[repr(value) for value in row] for row in finite.tolist()]


@lru_cache(CACHED_TEXTS)
def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache(CACHED_TEXTS)
def write_bytes(text: str) -> str:
    return json.dumps(list(text.encode("utf-8", errors="replace")), separators=(",", ":"))
