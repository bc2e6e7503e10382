"""What the API process and the workers say to each other.

A request asks by an extra argument, ``[number, point, …]``: the name that the API process knows it by, and numbers of
generated tokens, ascending. A worker sends messages of several frames, the first of which is its kind.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ARGUMENT = "darts_probe"
"""Name of the extra argument. Callers cannot send it: unknown arguments that begin with ``darts_`` are refused."""

READY = b"ready"
"""Followed by the width of the states and the name of the model runner as text: this worker will tell them."""
STATES = b"states"
"""Followed by the number and the tokens of each request, [n, 2] of int64, and by states, [n, width] of float32."""
FAULT = b"fault"
"""Followed by a text: nothing more will come from this worker."""


def pack_states(numbers: Sequence[int], tokens: Sequence[int], rows: NDArray[np.float32]) -> list[bytes]:
    """The frames that tell these states, one a request: [n, width]."""
    whose = np.array([numbers, tokens], dtype=np.int64).T
    return [STATES, whose.tobytes(), np.ascontiguousarray(rows, dtype=np.float32).tobytes()]


def unpack_states(whose: bytes, rows: bytes) -> list[tuple[int, int, NDArray[np.float32]]]:
    """Number, tokens and state of each request in such frames. States own their memory."""
    pairs = np.frombuffer(whose, dtype=np.int64).reshape(-1, 2)
    values = np.frombuffer(rows, dtype=np.float32).reshape(len(pairs), -1)
    return [(int(number), int(tokens), row.copy()) for (number, tokens), row in zip(pairs, values, strict=True)]
