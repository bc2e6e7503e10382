"""Messages between the process that scores and the one that trains: JSON and bytes, each after its length.

Nothing is pickled. Arrays travel as safetensors.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

LARGEST = 1 << 30
"""Bytes. A head of the widest model there is takes a tenth of it."""
_LENGTHS = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Frame:
    """``says``: flat JSON. ``body``: what goes with it."""

    says: Mapping[str, Any]
    body: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A labelled trajectory, as `Head.learn` takes it."""

    hidden: NDArray[np.floating]
    position: int
    target: float
    survival: float


def write(stream: IO[bytes], frame: Frame) -> None:
    """Raises ``OSError`` where nobody reads any more."""
    says = json.dumps(dict(frame.says)).encode()
    stream.write(_LENGTHS.pack(len(says), len(frame.body)) + says)
    stream.write(frame.body)
    stream.flush()


def read(stream: IO[bytes]) -> Frame | None:
    """The next message; ``None`` at the end, also where that is in the middle of one.

    Raises:
        ValueError: what came is no message.
    """
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    said, carried = _LENGTHS.unpack(lengths)
    if said + carried > LARGEST:
        raise ValueError(f"a message has {said + carried} bytes, at most {LARGEST} are read")
    says, body = stream.read(said), stream.read(carried)
    return Frame(json.loads(says), body) if (len(says), len(body)) == (said, carried) else None


def examples(labelled: Sequence[Example]) -> bytes:
    """Examples of one width as the body of a message."""
    return safetensors.save(
        {
            "hidden": np.stack([x.hidden for x in labelled]).astype(np.float32),
            "positions": np.asarray([x.position for x in labelled]),
            "targets": np.asarray([x.target for x in labelled]),
            "survivals": np.asarray([x.survival for x in labelled]),
        }
    )


def read_examples(body: bytes) -> list[Example]:
    """What `examples` was given."""
    arrays = safetensors.load(body)
    columns = (arrays["hidden"], *(arrays[name].tolist() for name in ("positions", "targets", "survivals")))
    return [Example(*row) for row in zip(*columns, strict=True)]
