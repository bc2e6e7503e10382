"""Messages between the process that scores and the process that trains the quality head.

They travel over pipes of `multiprocessing.connection`, as bytes: first a JSON object, then a body. Nothing is pickled,
so `Connection.send` and `Connection.recv` are not used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

PipeEnd: TypeAlias = "Connection[Any, Any]"

MAX_BYTES = 1 << 30
"""Of a JSON object or a body. The head of the widest known model takes a tenth of it."""


@dataclass(frozen=True, slots=True)
class Message:
    """``fields``: a JSON object. ``body``: labels or the state of a head, which JSON cannot hold."""

    fields: Mapping[str, Any]
    body: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A labelled trajectory: the arguments of `Head.learn`."""

    hidden: NDArray[np.floating]
    position: int
    target: float
    survival: float


def send(pipe: PipeEnd, message: Message) -> None:
    """Send a message; wait while the pipe is full.

    Raises:
        OSError: the other process has ended.
    """
    pipe.send_bytes(json.dumps(dict(message.fields)).encode())
    pipe.send_bytes(message.body)


def receive(pipe: PipeEnd) -> Message | None:
    """Wait for the next message; ``None`` when the other process has closed its end.

    Raises:
        OSError: the other process died while it sent, or sent more than `MAX_BYTES`.
        ValueError: it sent something else than JSON.
    """
    try:
        fields, body = pipe.recv_bytes(MAX_BYTES), pipe.recv_bytes(MAX_BYTES)
    except EOFError:
        return None
    return Message(json.loads(fields), body)


def pack_examples(examples: Sequence[Example]) -> bytes:
    """Pack examples of one width into the body of a message, as safetensors."""
    return safetensors.save(
        {
            "hidden": np.stack([x.hidden for x in examples]).astype(np.float32),
            "positions": np.asarray([x.position for x in examples]),
            "targets": np.asarray([x.target for x in examples]),
            "survivals": np.asarray([x.survival for x in examples]),
        }
    )


def unpack_examples(body: bytes) -> list[Example]:
    """Unpack the body that `pack_examples` made."""
    arrays = safetensors.load(body)
    columns = (arrays["hidden"], *(arrays[name].tolist() for name in ("positions", "targets", "survivals")))
    return [Example(*row) for row in zip(*columns, strict=True)]
