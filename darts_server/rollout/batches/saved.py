"""Prompts that are carried over, on the disk: from the end of one server to the start of the next."""

import asyncio
import json
import logging
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from darts_server.engine.port import PromptRenderer, TokenSlice
from darts_server.exceptions import StateDamaged, StateError
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt
from darts_server.rollout.candidates import CarriedCandidate, SavedEnd, compact
from darts_server.store.archive import Name
from darts_server.store.transactions import CarriedFile
from darts_server.types import FinishReason, PromptSpec

logger = logging.getLogger(__name__)

_PROMPT = TypeAdapter(PromptSpec)
KIND = "carried"
FORMAT = 1
TOKENS, LOGPROBS = "<i4", "<f8"
"""How they are on the disk."""
WRITE_BYTES = 1 << 23
"""Of documents that are written at once: about a tenth of a second."""
PORTABLE_SECONDS, SAVE_SECONDS = 2.0, 4.0
"""For all prompts at shutdown, before a supervisor ends it: to take outputs from the engine, and to write."""
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Raised by documents that have other fields than ours."""

Owned = tuple[str | None, CarriedPrompt]
"""A prompt, and the name of the caller that it is kept for."""


class SavedPrompts:
    """Prompts that a server which ended has kept.

    Args:
        disk: where they are.
        model: fingerprint of what is served. What another one has generated is not used.
    """

    def __init__(self, disk: CarriedFile, model: str) -> None:
        self._disk = disk
        self._model = model

    @property
    def is_durable(self) -> bool:
        """Whether what is saved outlives the server."""
        return self._disk.is_durable

    def save(self, prompts: Iterable[Owned], seconds: float = math.inf) -> int:
        """Save prompts in their order; how many are on the disk then. An error of the disk is logged, and ends it.

        What their candidates have generated must be `portable`. ``seconds``: after them no other document is begun.
        """
        saved = 0
        try:
            for changes in self._changes(prompts, time.monotonic() + seconds):
                self._disk.write(changes)
                saved += len(changes)
        except StateError as error:
            logger.error("prompts that were carried over cannot be saved: %s", error)
        return saved

    def _changes(self, prompts: Iterable[Owned], until: float) -> Iterator[dict[Name, bytes]]:
        """Yield what is to be written, in parts of about `WRITE_BYTES`."""
        changes: dict[Name, bytes] = {}
        size = 0
        for number, (owner, prompt) in enumerate(prompts):
            if time.monotonic() >= until:
                break
            changes[KIND, f"{number:08}"] = document = _encode(owner, prompt, self._model)
            size += len(document)
            if size >= WRITE_BYTES:
                yield changes
                changes, size = {}, 0
        yield changes

    async def save_in_time(
        self, prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any], *, with_tokens: bool
    ) -> int:
        """Save prompts at shutdown, as many as there is time for; log and return how many of them are lost.

        ``with_tokens``: otherwise they start again.
        """
        if with_tokens:
            prompts = await _all_portable(prompts, renderer)
        else:
            prompts = [(owner, replace(prompt, group=None)) for owner, prompt in prompts]
        saved = await asyncio.to_thread(self.save, prompts, SAVE_SECONDS)
        if lost := len(prompts) - saved:
            logger.error("%d prompts that were carried over are lost: they could not be saved, or not in time", lost)
        return lost

    def take(self, version: int) -> list[Owned]:
        """Remove and return what was saved: it must not come again if this server does not end in order.

        What cannot be read or removed is logged, and not returned; a damaged prompt is lost alone. Nothing is removed
        before all was read: what ends a start must not lose it.

        ``version``: that this server starts with. Versions are counted from the start of a server, so tokens of any
        other one may be of any weights, and their prompts start again.
        """
        documents: list[bytes] = []
        damaged: list[Exception] = []
        try:
            for key in self._disk.keys(KIND):
                try:
                    documents.append(self._disk.read(KIND, key) or b"")
                except StateDamaged as error:
                    damaged.append(error)
        except StateError as error:
            logger.error("prompts that were carried over are lost: %s", error)
        taken = self._read(documents, damaged, version)
        try:
            self._disk.clear()  # also the rows of the queue of earlier versions
        except StateError as error:
            logger.error("prompts that were carried over are not used, as they cannot be removed: %s", error)
            return []
        return taken

    def _read(self, documents: Iterable[bytes], lost: list[Exception], version: int) -> list[Owned]:
        """``lost``: why some others could not be read."""
        taken: list[Owned] = []
        restarted: list[Exception] = []
        for document in documents:
            try:
                fields, (owner, prompt) = _decode(document)
            except MALFORMED as error:
                lost.append(error)
                continue
            try:
                prompt = replace(prompt, group=self._group(fields, version))
            except MALFORMED as error:
                restarted.append(error)
            taken.append((owner, prompt))
        for errors, end in (lost, "are lost: this version cannot read them"), (restarted, "start again"):
            if errors:
                logger.error("%d prompts that were carried over %s (the first: %r)", len(errors), end, errors[0])
        return taken

    def _group(self, fields: Mapping[str, Any], version: int) -> CarriedGroup[Any] | None:
        """Return what was generated for a prompt, if the present weights are those that did."""
        if fields["group"] is None or fields["model"] != self._model:
            return None
        group = _decode_group(fields["group"])
        is_current = all(each == version for candidate in group.candidates for each, _ in candidate.version_spans)
        return group if is_current else None


async def _all_portable(prompts: Sequence[Owned], renderer: PromptRenderer[Any, Any]) -> list[Owned]:
    """Make prompts portable, and those start again for which there is no time."""
    ready: list[Owned] = []
    try:
        async with asyncio.timeout(PORTABLE_SECONDS):
            for owner, prompt in prompts:
                ready.append((owner, await _portable_or_restarted(prompt, renderer)))
                await asyncio.sleep(0)  # most need no turn of the event loop, and then the timeout would not be seen
    except TimeoutError:
        logger.error(
            "%d prompts that were carried over start again: what was generated for them could not be saved in time",
            len(prompts) - len(ready),
        )
    return ready + [(owner, replace(prompt, group=None)) for owner, prompt in prompts[len(ready) :]]


async def _portable_or_restarted(prompt: CarriedPrompt, renderer: PromptRenderer[Any, Any]) -> CarriedPrompt:
    try:
        return await portable(prompt, renderer)
    except Exception:  # one output without a text must not lose all prompts
        logger.exception("the prompt %.64r that was carried over starts again", prompt.identity[0])
        return replace(prompt, group=None)


async def portable(prompt: CarriedPrompt, renderer: PromptRenderer[Any, Any]) -> CarriedPrompt:
    """Return a prompt without outputs of the engine: those of candidates that have finished become tokens and text."""
    if prompt.group is None:
        return prompt
    candidates = [await _portable(candidate, renderer) for candidate in prompt.group.candidates]
    return replace(prompt, group=replace(prompt.group, candidates=candidates))


async def _portable(candidate: CarriedCandidate[Any], renderer: PromptRenderer[Any, Any]) -> CarriedCandidate[Any]:
    result = candidate.result
    if result is None or result.finish_reason is None:
        return candidate
    sample = await renderer.to_sample(result.output)
    return replace(candidate, result=None, saved_end=SavedEnd(result.finish_reason, sample.text))


def _encode(owner: str | None, prompt: CarriedPrompt, model: str) -> bytes:
    return json.dumps(
        {
            "format": FORMAT,
            "model": model,
            "owner": owner,
            "prompt": _PROMPT.dump_json(prompt.prompt, exclude_none=True).decode(),
            "identity": prompt.identity,
            "group": None if prompt.group is None else _encode_group(prompt.group),
        }
    ).encode()


def _encode_group(group: CarriedGroup[Any]) -> dict[str, Any]:
    return {
        "terms": group.terms,
        "saturated": group.saturated,
        "tail_seed": list(group.tail_seed),
        "candidates": [_encode_candidate(candidate) for candidate in group.candidates],
    }


def _encode_candidate(candidate: CarriedCandidate[Any]) -> dict[str, Any]:
    assert candidate.result is None, "it is not portable"
    logprobs, end = candidate.prefix.logprobs, candidate.saved_end
    return {
        "token_ids": _packed(candidate.prefix.token_ids, TOKENS),
        "logprobs": None if logprobs is None else _packed(logprobs, LOGPROBS),
        "version_spans": candidate.version_spans,
        "end": None if end is None else [end.finish_reason, end.text],
    }


def _decode(document: bytes) -> tuple[Mapping[str, Any], Owned]:
    """Decode a document, and its prompt without what was generated for it."""
    fields = json.loads(document)
    if fields["format"] != FORMAT:
        raise ValueError(f"its format is {fields['format']}, not {FORMAT}")
    owner, (key, content) = fields["owner"], fields["identity"]
    if not (isinstance(owner, str | None) and isinstance(key, str) and isinstance(content, str)):
        raise ValueError("its owner or its identity is no text")
    prompt = _PROMPT.validate_json(fields["prompt"], strict=True)
    if [prompt.token_ids, prompt.messages, prompt.text].count(None) != 2:
        raise ValueError("it has no prompt")
    return fields, (owner, CarriedPrompt(prompt, (key, content)))


def _decode_group(fields: Mapping[str, Any]) -> CarriedGroup[Any]:
    terms, saturated, tail_seed = fields["terms"], fields["saturated"], fields["tail_seed"]
    candidates = [_decode_candidate(candidate) for candidate in fields["candidates"]]
    if not (isinstance(terms, str) and isinstance(saturated, bool) and _are_counts(tail_seed)):
        raise ValueError("it has other terms or another seed than a group can have")
    if len({candidate.prefix.logprobs is None for candidate in candidates if candidate.tokens}) > 1:
        raise ValueError("some of its candidates have log-probs, and others not")
    return CarriedGroup(terms, saturated, tail_seed, candidates)


def _decode_candidate(fields: Mapping[str, Any]) -> CarriedCandidate[Any]:
    token_ids = _unpacked(fields["token_ids"], TOKENS)
    logprobs = None if fields["logprobs"] is None else _unpacked(fields["logprobs"], LOGPROBS)
    spans = tuple((version, tokens) for version, tokens in fields["version_spans"])
    counts = {len(token_ids), sum(tokens for _, tokens in spans), *([] if logprobs is None else [len(logprobs)])}
    if len(counts) > 1 or not all(_are_counts(span) and span[1] for span in spans) or not _are_counts(token_ids):
        raise ValueError("it has not as many log-probs or versions as tokens")
    end = None
    if fields["end"] is not None:
        reason, text = fields["end"]
        if not isinstance(text, str):
            raise ValueError("its end has no text")
        end = SavedEnd(FinishReason(reason), text)
    return CarriedCandidate(compact(TokenSlice(token_ids, logprobs)), spans, None, end)


def _are_counts(values: Sequence[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _packed(values: Sequence[float], dtype: str) -> str:
    return b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpacked(packed: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(b64decode(packed), dtype).tolist()
    return values
