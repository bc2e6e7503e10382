"""Read from a request what it is routed by."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from darts_server.http.options import merge_options, read_options
from darts_server.identifiers import SESSION_HEADERS
from darts_server.types import RequestOptions

INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed in the event loop, larger ones in a thread."""
MAX_READ_BYTES = 8 * 1024 * 1024
"""Larger bodies are not parsed: those that are equal meet on one replica, and nothing else is known of them."""
MAX_COUNT = 1 << 20
"""Of what is expected of one request; the replica refuses more."""
PROMPTS = ("prompt", "messages", "input", "token_ids")
NESTED = ("sampling_params", "sampling")
MAX_TOKENS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
SCORING = ("prompt_logprobs", "echo")
RAW_SUFFIX = ":raw"
OFF = "off"
SIZE_OF_DIGEST = 7
"""Bytes: such a number is a positive signed integer of 64 bits."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request for generation says.

    ``scope``: of whom requests may meet: those with the same key. ``candidates``: that it asks for, over all prompts.
    ``units``: the prompt as numbers, with which a later turn's prompt begins: token ids, the bytes of a text, or a
    digest of each message. ``group``, ``session``: their names. ``key``: of the prompt. ``may_join``: whether it may be
    one of several requests that form a group.
    """

    scope: str = ""
    candidates: int = 1
    max_tokens: int | None = None
    units: Sequence[int] = ()
    is_chat: bool = False
    group: str | None = None
    session: str | None = None
    key: str | None = None
    may_join: bool = False


async def read_terms(headers: Mapping[str, str], body: bytes, pattern: re.Pattern[str] | None) -> Terms:
    """Read a request. ``pattern``: of sessions that name their group.

    Raises:
        InvalidRequest: one of our headers or arguments is invalid.
    """
    scope = headers.get("authorization", "")
    if len(body) > MAX_READ_BYTES:
        return Terms(scope, units=[digest(body)], may_join=True)
    sent = _parsed(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(_parsed, body)
    if not isinstance(sent, dict):
        return Terms(scope)  # the replica says what is wrong with it
    options = merge_options(read_options(headers), _xargs(sent))
    nested: Mapping[str, Any] = next((sent[name] for name in NESTED if isinstance(sent.get(name), dict)), {})
    count, units, is_chat = _prompts(sent)
    n = _count(sent.get("n", nested.get("n")), 1)
    session = options.session or next((headers[name] for name in SESSION_HEADERS if headers.get(name)), None)
    match = pattern.fullmatch(session) if pattern is not None and session is not None else None
    key = sent.get("key")  # of a vote
    return Terms(
        scope=scope,
        candidates=min(MAX_COUNT, n * count),
        max_tokens=_max_tokens(sent, nested),
        units=units,
        is_chat=is_chat,
        group=options.group_id or (match[1] if match is not None else None),
        session=session,
        key=options.prompt_key or (key if isinstance(key, str) else None),
        may_join=n == 1 and _is_sampled(sent, nested, options),
    )


def digest(data: bytes) -> int:
    """Return a number for some data."""
    return int.from_bytes(blake2b(data, digest_size=SIZE_OF_DIGEST).digest())


def prompt_units(prompt: object) -> tuple[Sequence[int], bool]:
    """Return a prompt as numbers, and whether it is a chat."""
    if isinstance(prompt, str):
        return list(prompt.encode(errors="surrogatepass")), False
    if not isinstance(prompt, list) or not prompt:
        return (), False
    if all(type(token) is int and 0 <= token < 1 << 62 for token in prompt):
        return prompt, False
    return [digest(json.dumps(each, sort_keys=True).encode()) for each in prompt], True


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _prompts(sent: Mapping[str, Any]) -> tuple[int, Sequence[int], bool]:
    """Return the number of prompts, all of them as numbers, and whether it is a chat."""
    prompt = next((sent[name] for name in PROMPTS if sent.get(name)), None)
    units, is_chat = prompt_units(prompt)
    if is_chat and "prompt" in sent:  # a list of texts, or of lists of token ids
        return len(units), [digest(repr(units).encode())], False
    return 1, units, is_chat


def _xargs(sent: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = sent.get("sampling_params")
    places = [sent.get("vllm_xargs"), nested.get("vllm_xargs") if isinstance(nested, dict) else None]
    places.append(nested.get("extra_args") if isinstance(nested, dict) else None)
    return {name: value for place in places if isinstance(place, dict) for name, value in place.items()}


def _max_tokens(sent: Mapping[str, Any], nested: Mapping[str, Any]) -> int | None:
    for name in MAX_TOKENS:
        value = sent.get(name, nested.get(name))
        if type(value) is int and value > 0:
            return value
    return None


def _is_sampled(sent: Mapping[str, Any], nested: Mapping[str, Any], options: RequestOptions) -> bool:
    """Whether a server may put the request into a group: it is shaped, and sampled to be trained on."""
    model = sent.get("model")
    is_off = options.policy == OFF or (isinstance(model, str) and model.endswith(RAW_SUFFIX))
    is_greedy = sent.get("temperature", nested.get("temperature")) == 0
    is_scoring = _max_tokens(sent, nested) == 1 or any(sent.get(name, nested.get(name)) for name in SCORING)
    return not (is_off or is_greedy or is_scoring)


def _count(value: object, default: int) -> int:
    return value if type(value) is int and value > 0 else default
