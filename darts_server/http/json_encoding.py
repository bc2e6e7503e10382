"""Encode answers that have many tokens: arrays of them are written as they are, without an object for each value."""

import json
import re
from array import array
from typing import Any

import msgspec
import numpy as np

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def encode_json(value: Any) -> bytes:
    """Encode a value, in which sequences of numbers may be arrays. Numbers that JSON does not have are null.

    Integers of more than 64 bits are refused: what callers chose is put in as `msgspec.Raw`.
    """
    return _encoder.encode(value)


def encode_ascii(value: Any) -> str:
    """Encode a value as `encode_json` does, with all other characters escaped."""
    text = encode_json(value).decode()
    return text if text.isascii() else _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _encode_array(value: Any) -> Any:
    # One after the other, each by itself: the encoder does not let other threads run meanwhile.
    if isinstance(value, array | np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot encode a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_array)
