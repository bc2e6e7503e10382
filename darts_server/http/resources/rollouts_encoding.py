"""Encode the answer to a batch: as JSON, or as tensors with the rest as JSON."""

import json
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from msgspec import Raw

from darts_server.http.json_encoding import encode_json
from darts_server.http.resources.rollouts_models import GroupOut, RolloutsOut, UnfinishedOut, usage_of
from darts_server.http.token_tensors import TokenTensors
from darts_server.rollout.batches.events import BatchDone, GroupResult, Unfinished
from darts_server.rollout.batches.run import BatchRun

TOKEN_LISTS = ("aborted", "trajectories")
"""Fields of a group, and of an unfinished prompt, whose items have tokens."""


def group_fields(result: GroupResult, exclude: Any = None) -> dict[str, Any]:
    """Return the fields of `GroupOut`, with arrays of tokens as they are."""
    return GroupOut.of(result).model_dump(exclude=exclude) | _metadata(result.metadata)


def encode_answer(batch: BatchRun, done: BatchDone) -> bytes:
    """Encode the answer as JSON."""
    return _encode(batch, done, None)


def encode_tensors(batch: BatchRun, done: BatchDone) -> TokenTensors:
    """Take the tokens from the answer: it has the numbers of their rows in place of the lists."""
    tensors = TokenTensors()
    tensors.answer = _encode(batch, done, tensors)
    return tensors


def _encode(batch: BatchRun, done: BatchDone, tensors: TokenTensors | None) -> bytes:
    head = RolloutsOut(
        id=batch.batch_id,
        policy=batch.policy,
        groups=[],
        survivors=batch.survivors,
        sampling={},
        unfinished=[],
        carried=done.carried,
        usage=usage_of(done),
    ).model_dump()
    # Callers choose its numbers, which may be any that JSON has.
    head["sampling"] = Raw(json.dumps(dict(batch.sampling), separators=(",", ":")).encode())
    answer = BytesIO()  # it does not copy the whole answer at once, for which the event loop would have to wait
    groups = sorted(done.results, key=lambda result: result.number)
    for place, (name, value) in enumerate(head.items()):
        answer.write((b"," if place else b"{") + encode_json(name) + b":")
        if name == "groups":
            _write_list(answer, (group_fields(group) for group in groups), tensors)
        elif name == "unfinished":
            _write_list(answer, (_unfinished_fields(prompt) for prompt in done.unfinished), tensors)
        else:
            answer.write(encode_json(value))
    answer.write(b"}")
    return answer.getvalue()


def _write_list(answer: BytesIO, items: Iterable[dict[str, Any]], tensors: TokenTensors | None) -> None:
    answer.write(b"[")
    for place, fields in enumerate(items):
        if tensors is not None:
            take_tokens(fields, tensors)
        answer.write(b"," * (place > 0) + encode_json(fields))
    answer.write(b"]")


def take_tokens(fields: dict[str, Any], tensors: TokenTensors) -> None:
    """Put the tokens of a group or an unfinished prompt into rows, and the rows' numbers in their places."""
    for name in TOKEN_LISTS:
        for item in fields.get(name) or ():
            row = tensors.add(item["token_ids"], item["logprobs"])
            item["token_ids"], item["logprobs"] = row, None if item["logprobs"] is None else row


def _unfinished_fields(prompt: Unfinished) -> dict[str, Any]:
    return UnfinishedOut.of(prompt).model_dump() | _metadata(prompt.metadata)


def _metadata(metadata: bytes | None) -> dict[str, Raw]:
    """Return the caller's metadata as it was encoded, whatever numbers it has."""
    return {} if metadata is None else {"metadata": Raw(metadata)}
