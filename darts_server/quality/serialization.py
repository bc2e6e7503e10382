"""The file format of a head: a line of ASCII, then safetensors.

The line is ``darts-quality-head VERSION SHA256``, with the SHA-256 (hex) of all bytes after it. Integers are JSON in
the metadata of the safetensors part. Nothing is pickled, so bytes from the network cannot run code.
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
LARGEST = 2**52

Arrays = Mapping[str, NDArray[np.generic]]


def pack(arrays: Arrays, numbers: Mapping[str, int]) -> bytes:
    """Serialize arrays and numbers; equal ones give equal bytes."""
    body = safetensors.save(
        {name: np.asarray(x, order="C") for name, x in arrays.items()},
        metadata={_NUMBERS: json.dumps(dict(numbers), sort_keys=True)},
    )
    return b"darts-quality-head %d %s\n" % (VERSION, hashlib.sha256(body).hexdigest().encode()) + body


def unpack(data: bytes) -> tuple[dict[str, NDArray[np.generic]], dict[str, int]]:
    """Read the arrays and numbers that `pack` serialized.

    Raises:
        StateDamaged: `pack` did not make this, or bytes are missing or changed.
        StateTooNew: a newer version made it.
    """
    line = _FIRST_LINE.match(data)
    if not line:
        raise state_damaged("does not begin like one")
    if int(line[1]) > VERSION:
        raise StateTooNew(
            f"the quality head given was saved by a newer darts-server (format {int(line[1])}, this one reads "
            f"{VERSION}); nothing was changed. Upgrade this server"
        )
    body = data[line.end() :]
    if hashlib.sha256(body).hexdigest().encode() != line[2]:
        raise state_damaged("is incomplete or was changed: its checksum is wrong")
    try:
        numbers = json.loads(_metadata(body)[_NUMBERS])
        arrays = safetensors.load(body)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise state_damaged(f"cannot be read ({error!r})") from error
    if not isinstance(numbers, dict) or not all(type(n) is int and 0 <= n <= LARGEST for n in numbers.values()):
        raise state_damaged(f"has numbers that are not integers in [0, {LARGEST}]")
    return arrays, numbers


def state_damaged(problem: str) -> StateDamaged:
    return StateDamaged(f"the quality head given {problem}; nothing was changed. Give a saved one, byte for byte")


def _metadata(body: bytes) -> dict[str, str]:
    """Read the metadata from the header of safetensors: JSON, after its length in eight bytes, little-endian.

    The reader for bytes of the library returns tensors only.
    """
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return dict(header["__metadata__"])
