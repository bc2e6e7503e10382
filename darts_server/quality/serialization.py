"""A head as bytes: a line of ASCII, then safetensors.

The first line is ``darts-quality-head VERSION SHA256``, the SHA-256 (hex) being that of all bytes after it. The numbers
that are no tensors are JSON in the metadata of the safetensors part. Nothing is pickled: bytes from the network can do
no more than be refused.
"""

import hashlib
import json
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from darts_server.exceptions import StateDamaged, StateTooNew

VERSION = 1
_FIRST_LINE = re.compile(rb"darts-quality-head ([1-9][0-9]{0,8}) ([0-9a-f]{64})\n")
_NUMBERS = "numbers"

Arrays = Mapping[str, NDArray[np.generic]]


def pack(arrays: Arrays, numbers: Mapping[str, int]) -> bytes:
    """The arrays and numbers as bytes; the same ones give the same bytes."""
    body = safetensors.save(
        {name: np.asarray(x, order="C") for name, x in arrays.items()},
        metadata={_NUMBERS: json.dumps(dict(numbers), sort_keys=True)},
    )
    return b"darts-quality-head %d %s\n" % (VERSION, hashlib.sha256(body).hexdigest().encode()) + body


def unpack(data: bytes) -> tuple[dict[str, NDArray[np.generic]], dict[str, int]]:
    """What `pack` was given.

    Raises:
        StateDamaged: `pack` did not make this, or it is not whole.
        StateTooNew: a newer version made it.
    """
    first = _FIRST_LINE.match(data)
    if not first:
        raise damaged("does not begin like one")
    if int(first[1]) > VERSION:
        raise StateTooNew(
            f"the quality head given was saved by a newer darts-server (format {int(first[1])}, this one reads "
            f"{VERSION}); nothing was changed. Upgrade this server"
        )
    body = data[first.end() :]
    if hashlib.sha256(body).hexdigest().encode() != first[2]:
        raise damaged("is incomplete or was changed: its checksum is wrong")
    try:
        numbers = json.loads(_metadata(body)[_NUMBERS])
        arrays = safetensors.load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(f"cannot be read ({error!r})") from error
    if not isinstance(numbers, dict) or not all(type(n) is int and n >= 0 for n in numbers.values()):
        raise damaged("has numbers that are none")
    return arrays, numbers


def damaged(what: str) -> StateDamaged:
    return StateDamaged(f"the quality head given {what}; nothing was changed. Give a saved one, byte for byte")


def _metadata(body: bytes) -> dict[str, str]:
    """The metadata of safetensors: its header is JSON, after its length as eight bytes, little-endian."""
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return dict(header["__metadata__"])
