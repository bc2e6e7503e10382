"""A batch that is answered at once: the request, and its answer as tensors or as JSON. No I/O."""

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import httpx

from ._errors import ProtocolError
from ._models import Group, Unfinished, Usage, WireModel, parse
from ._rollouts import GroupPayload, RolloutsRequest, build_group, tokens_in_payload

TENSORS = "application/vnd.safetensors"
# Earlier servers answer as JSON.
ACCEPT = f"{TENSORS}, application/json;q=0.9"
HEADER_LENGTH = 8
ARRAY_TYPES = {"I64": "q", "I32": "i", "F32": "f", "U8": "B"}


@dataclass(frozen=True, slots=True)
class Batch:
    """The answer to a batch. `groups` has the complete groups in the order of the prompts."""

    id: str
    policy: str
    sampling: Mapping[str, Any]
    """Sampling parameters in force."""
    groups: tuple[Group, ...]
    failed: tuple[Group, ...]
    """Groups with an `error` and no trajectories."""
    unfinished: tuple[Unfinished, ...]
    carried: int
    """Number of prompts that the server keeps for later batches."""
    usage: Usage
    shortfall: int = 0
    """Number of groups that are missing to `num_groups`."""
    uninformative: tuple[int, ...] = ()
    """Numbers of the prompts whose groups did not count under `only`."""


class _Answer(WireModel):
    id: str
    policy: str
    survivors: bool = False
    sampling: dict[str, Any] | None = None
    groups: tuple[GroupPayload, ...]
    unfinished: tuple[Unfinished, ...] = ()
    carried: int = 0
    shortfall: int = 0
    uninformative: tuple[int, ...] = ()
    usage: Usage


class TokenRows:
    """Rows of tokens and log-probs in tensors."""

    def __init__(self, offsets: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self._offsets = offsets
        self._token_ids = token_ids
        self._logprobs = logprobs

    def token_ids(self, row: int) -> tuple[int, ...]:
        """Raise ValueError if there is no such row."""
        return tuple(self._token_ids[self._slice(row)])

    def logprobs(self, row: int) -> tuple[float, ...]:
        """Raise ValueError if there are none, or if a log-prob is not finite."""
        if self._logprobs is None:
            raise ValueError("there are no log-probs")
        values = tuple(self._logprobs[self._slice(row)])
        # One check for a row: the sum is finite only if all values are.
        if not isfinite(sum(values)):
            raise ValueError(f"row {row} has a log-prob that is not finite")
        return values

    def _slice(self, row: int) -> slice:
        if type(row) is not int or not 0 <= row < len(self._offsets) - 1:
            raise ValueError(f"there is no row {row!r}")
        return slice(self._offsets[row], self._offsets[row + 1])


def batch_options(request: RolloutsRequest) -> dict[str, Any]:
    headers = {"Accept": ACCEPT, "Content-Type": "application/json"}
    is_durable = request.idempotency_key is not None
    if request.idempotency_key is not None:
        headers["Idempotency-Key"] = request.idempotency_key
    # The server finds a durable batch by its key, so the request may be sent again.
    return {"headers": headers, "content": request.content, "idempotent": is_durable}


def read_batch(request: RolloutsRequest, response: httpx.Response) -> Batch:
    """Read the answer to a batch. Raise ProtocolError if it does not have the requested groups."""
    source = response.url.path
    if response.headers.get("content-type") == TENSORS:
        content, rows = _read_tensors(response.content, source)
        answer = parse(
            _Answer,
            content,
            source,
            token_rows=rows,
        )
    else:
        answer = parse(_Answer, response.content, source)

    # Each prompt must have exactly one result.
    prompt_numbers = [group.number for group in answer.groups] + [prompt.number for prompt in answer.unfinished]
    # With `return_zero_variance` uninformative groups are in `answer.groups`, too.
    prompt_numbers += set(answer.uninformative).difference(prompt_numbers)
    prompt_numbers.sort()
    num_sent = len(request.token_ids)
    num_expected = num_sent
    # With `carried`, the server adds prompts of earlier batches after the sent prompts.
    if request.carried:
        num_expected = max(num_sent, len(prompt_numbers))
    if prompt_numbers != list(range(num_expected)):
        raise ProtocolError(f"{source}: {num_sent} prompt(s) were sent, but the answer has {prompt_numbers}")

    groups = [build_group(group, request, tokens_in_payload, answer.survivors) for group in answer.groups]
    return Batch(
        id=answer.id,
        policy=answer.policy,
        sampling=answer.sampling or {},
        groups=tuple(group for group in groups if group.error is None),
        failed=tuple(group for group in groups if group.error is not None),
        unfinished=answer.unfinished,
        carried=answer.carried,
        usage=answer.usage,
        shortfall=answer.shortfall,
        uninformative=answer.uninformative,
    )


def _read_tensors(content: bytes, source: str) -> tuple[bytes, TokenRows]:
    try:
        data_start = HEADER_LENGTH + int.from_bytes(content[:HEADER_LENGTH], "little")
        header: dict[str, Any] = json.loads(content[HEADER_LENGTH:data_start])
        data = memoryview(content)[data_start:]
        arrays = {name: _read_array(entry, data) for name, entry in header.items() if name != "__metadata__"}
        rows = TokenRows(arrays["offsets"], arrays["token_ids"], arrays.get("logprobs"))
        # The JSON is a tensor of bytes. It has row numbers in place of lists of tokens.
        return arrays["answer"].tobytes(), rows
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ProtocolError(f"{source}: the answer is not a file of the expected tensors: {exc!r}") from exc


# The annotation is a string because Python 3.11 has no `array[Any]`.
def _read_array(header_entry: Mapping[str, Any], data: memoryview) -> "array[Any]":
    begin, end = header_entry["data_offsets"]
    values = array(ARRAY_TYPES[header_entry["dtype"]])
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"a tensor ends at {end} of {len(data)} bytes")
    values.frombytes(data[begin:end])
    # safetensors is little-endian.
    if sys.byteorder == "big":
        values.byteswap()
    return values
