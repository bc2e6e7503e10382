"""The messages between the API process and the workers.

A request has a probe if it has the extra argument ``[number, point, …]``: a number that identifies it in the API
process, and numbers of generated tokens, ascending. A worker sends messages of several frames, the first of which is
the kind of message.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ARGUMENT = "darts_probe"
"""Name of the extra argument. Callers cannot send it: unknown arguments that begin with ``darts_`` are refused."""

READY = b"ready"
"""Followed by the width of the states and the name of the model runner, as text: this worker will send states."""
STATES = b"states"
"""Followed by the number and the tokens of each request, [n, 2] of int64, and by states, [n, width] of float32."""
FAULT = b"fault"
"""Followed by an error message: this worker will send nothing more."""


def pack_states(numbers: Sequence[int], tokens: Sequence[int], rows: NDArray[np.float32]) -> list[bytes]:
    """Pack states, one per request, [n, width], into the frames of a message."""
    pairs = np.array([numbers, tokens], dtype=np.int64).T
    return [STATES, pairs.tobytes(), np.ascontiguousarray(rows, dtype=np.float32).tobytes()]


def unpack_states(pairs: bytes, rows: bytes) -> list[tuple[int, int, NDArray[np.float32]]]:
    """Unpack number, tokens and state of each request from the frames behind `STATES`. States own their memory."""
    identified = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
    states = np.frombuffer(rows, dtype=np.float32).reshape(len(identified), -1)
    return [(int(number), int(tokens), row.copy()) for (number, tokens), row in zip(identified, states, strict=True)]
