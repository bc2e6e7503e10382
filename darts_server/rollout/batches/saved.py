"""Prompts that are carried over, on the disk: from the end of one server to the start of the next."""

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from darts_server.engine.port import PromptRenderer, TokenSlice
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt
from darts_server.rollout.carried import CarriedCandidate, SavedEnd, compact
from darts_server.rollout.prompt_documents import decode_prompt, encode_prompt
from darts_server.store.transactions import TransactionStore
from darts_server.types import FinishReason

logger = logging.getLogger(__name__)

KIND = "carried"
FORMAT = 1
TOKENS, LOGPROBS = "<i4", "<f8"
"""How they are on the disk."""

Owned = tuple[str | None, CarriedPrompt]
"""A prompt, and the name of the caller that it is kept for."""


class SavedPrompts:
    """Prompts that a server which ended has kept.

    Args:
        disk: where they are.
        model: what is served. What another one has generated is not used.
    """

    def __init__(self, disk: TransactionStore, model: str) -> None:
        self._disk = disk
        self._model = model

    @property
    def is_durable(self) -> bool:
        """Whether what is saved outlives the server."""
        return self._disk.is_durable

    def save(self, prompts: Iterable[Owned]) -> None:
        """Save prompts, in their order. What their candidates have generated must be `portable`.

        Raises:
            StateError: nothing was saved.
        """
        documents = (_encode(owner, prompt, self._model) for owner, prompt in prompts)
        self._disk.write({(KIND, f"{place:08}"): document for place, document in enumerate(documents)})

    def take(self, version: int) -> list[Owned]:
        """Remove and return what was saved: it must not come again if this server does not end in order.

        ``version``: that this server starts with. Versions are counted from the start of a server, so tokens of any
        other one may be of any weights, and their prompts start again.

        Raises:
            StateError: they cannot be read, or not be removed.
        """
        documents = sorted(self._disk.items(KIND))
        self._disk.write({(KIND, key): None for key, _ in documents})
        taken = []
        for _, document in documents:
            try:
                taken.append(_decode(document, self._model, version))
            except (ValueError, TypeError, KeyError) as error:
                logger.error("a prompt that was carried over is lost: this version cannot read it (%r)", error)
        return taken


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
            "prompt": encode_prompt(prompt.prompt).decode(),
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


def _decode(document: bytes, model: str, version: int) -> Owned:
    fields = json.loads(document)
    if fields["format"] != FORMAT:
        raise ValueError(f"its format is {fields['format']}, not {FORMAT}")
    key, content = fields["identity"]
    group = None if fields["group"] is None or fields["model"] != model else _decode_group(fields["group"])
    if group is not None and any(each != version for c in group.candidates for each, _ in c.version_spans):
        group = None
    return fields["owner"], CarriedPrompt(decode_prompt(fields["prompt"].encode()), (key, content), group)


def _decode_group(fields: Mapping[str, Any]) -> CarriedGroup[Any]:
    candidates = [_decode_candidate(candidate) for candidate in fields["candidates"]]
    return CarriedGroup(fields["terms"], fields["saturated"], fields["tail_seed"], candidates)


def _decode_candidate(fields: Mapping[str, Any]) -> CarriedCandidate[Any]:
    token_ids = _unpacked(fields["token_ids"], TOKENS)
    logprobs = None if fields["logprobs"] is None else _unpacked(fields["logprobs"], LOGPROBS)
    spans = tuple((version, tokens) for version, tokens in fields["version_spans"])
    counts = {len(token_ids), sum(tokens for _, tokens in spans), *([] if logprobs is None else [len(logprobs)])}
    if len(counts) > 1:
        raise ValueError("it has not as many log-probs or versions as tokens")
    end = None if fields["end"] is None else SavedEnd(FinishReason(fields["end"][0]), fields["end"][1])
    return CarriedCandidate(compact(TokenSlice(token_ids, logprobs)), spans, None, end)


def _packed(values: Sequence[float], dtype: str) -> str:
    return b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpacked(packed: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(b64decode(packed), dtype).tolist()
    return values
