"""Receive the engine's log-probs packed: as the bytes in which they come, which are unpacked when something reads them.

The engine sends three small arrays for each token. Making them takes longer than everything else that is done with an
output without log-probs; unpacking those of many tokens at once takes an eighth of that.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from types import FunctionType
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, structs
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder

PACKED, LOGPROBS, OUTPUTS = "packed_logprobs", "new_logprobs", "outputs"
NOTHING = (b"", b"\xc0")
"""What stands for no log-probs: a field that was left out, and msgpack's nil."""
ARRAY_32 = b"\xdd"
"""How msgpack begins an array with a length of four bytes."""
Array = tuple[str, tuple[int, ...], Any]
"""How vLLM sends an array: its type, shape and bytes."""


class _Unpacked:
    """Methods of the outputs that are received."""

    packed_logprobs: Any

    @property
    def new_logprobs(self) -> LogprobsLists | None:
        """The arrays, for vLLM's own requests."""
        packed = self.packed_logprobs
        if isinstance(packed, Raw):
            self.packed_logprobs = None if bytes(packed) in NOTHING else _unpack_one(packed)
        arrays: LogprobsLists | None = self.packed_logprobs
        return arrays

    @new_logprobs.setter
    def new_logprobs(self, arrays: LogprobsLists | None) -> None:
        """Replace them, as vLLM does from 0.32 on where a stop string ends in the middle of a step's tokens."""
        self.packed_logprobs = arrays


def receive_packed(engine_core: Any) -> None:
    """Let the engine's outputs have their log-probs packed from now on, as bytes in ``packed_logprobs``.

    ``new_logprobs`` has them as vLLM's own outputs do. In a message with large arrays, which come in frames of their
    own, all outputs are vLLM's own.
    """
    vllms: MsgpackDecoder = engine_core.decoder
    if "decode" in vars(vllms):
        return
    decode = vllms.decode
    packed = msgspec.msgpack.Decoder(_packed_type(), ext_hook=vllms.ext_hook, dec_hook=vllms.dec_hook)

    def decode_packed(frames: Any) -> Any:
        return packed.decode(frames[0]) if len(frames) == 1 else decode(frames)

    vllms.decode = decode_packed  # type: ignore[assignment, method-assign]  # of this one decoder


def unpack(packed: bytes | bytearray, outputs: int) -> list[LogprobsLists]:
    """Unpack the log-probs of several outputs, in order. Those of the same width are joined."""
    arrays = _arrays.decode(ARRAY_32 + outputs.to_bytes(4, "big") + packed)
    return [_join(list(alike)) for _, alike in groupby(arrays, _layout)]


def _unpack_one(packed: Raw) -> LogprobsLists:
    # Written out: requests of vLLM's own get every token's arrays by this.
    (type_1, shape_1, data_1), (type_2, shape_2, data_2), (type_3, shape_3, data_3), _ = _arrays_of_one.decode(packed)
    return LogprobsLists(
        np.frombuffer(data_1, type_1).reshape(shape_1),
        np.frombuffer(data_2, type_2).reshape(shape_2),
        np.frombuffer(data_3, type_3).reshape(shape_3),
    )


def copied(logprobs: LogprobsLists) -> LogprobsLists:
    """Copy arrays, which would keep the whole message that they came in."""
    return each_array(logprobs, np.array)


def each_array(logprobs: LogprobsLists, change: Callable[[NDArray[Any]], NDArray[Any]]) -> LogprobsLists:
    """Return log-probs with their arrays changed in the same way."""
    return LogprobsLists(
        change(logprobs.logprob_token_ids), change(logprobs.logprobs), change(logprobs.sampled_token_ranks)
    )


def _layout(arrays: Sequence[Any]) -> Sequence[Any]:
    return [(dtype, shape[1:]) for dtype, shape, _ in arrays[:3]]


def _join(outputs: Sequence[Sequence[Any]]) -> LogprobsLists:
    token_ids, logprobs, ranks = (_array([output[column] for output in outputs]) for column in range(3))
    return LogprobsLists(token_ids, logprobs, ranks)


def _array(parts: Sequence[Array]) -> NDArray[Any]:
    dtype, shape, _ = parts[0]
    values = np.frombuffer(b"".join([data for _, _, data in parts]), dtype=dtype)
    return values.reshape(-1, *shape[1:])


def _received(name: str, original: type[msgspec.Struct], replaced: dict[str, tuple[str, Any]], *mixed: type) -> Any:
    """Define the struct that a struct of vLLM is received as. ``replaced``: name and type of fields in their places."""
    fields: list[Any] = []
    for field in structs.fields(original):
        new_name, new_type = replaced.get(field.name, (field.name, field.type))
        default: Any = Raw() if new_type is Raw else field.default
        if field.required:
            fields.append((new_name, new_type))
        elif default is msgspec.NODEFAULT:
            fields.append((new_name, new_type, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((new_name, new_type, default))
    inside = {
        name: value
        for cls in (original, *mixed)
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType | property)
    }
    return msgspec.defstruct(name, fields, namespace=inside, array_like=True, omit_defaults=True, gc=False)


@cache
def _packed_type() -> Any:
    output: Any = _received("PackedOutput", EngineCoreOutput, {LOGPROBS: (PACKED, Raw)}, _Unpacked)
    return _received("PackedOutputs", EngineCoreOutputs, {OUTPUTS: (OUTPUTS, list[output])})


def _bytes(_: int, data: memoryview) -> memoryview:
    return data


_arrays = msgspec.msgpack.Decoder(list[tuple[Array, Array, Array, Any]], ext_hook=_bytes)
_arrays_of_one = msgspec.msgpack.Decoder(tuple[Array, Array, Array, Any], ext_hook=_bytes)
