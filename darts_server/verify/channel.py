"""Messages between the server and a verifier's process.

The server sends a `Task`, and then batches of `Item`. The process answers each message with a `Report`, a line of JSON,
which cannot run code in the server. Before each call, the process writes its time and its answer's index into memory
that it shares with the server.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from darts_server.verify.calls import Call
from darts_server.verify.specs import Kind

RUNNING_CALL = struct.Struct("=dq")
"""Shared memory: when the running call started, by the monotonic clock, and the index of its answer in the batch."""
SEVERAL_ANSWERS = -1
"""In place of an index: no call runs yet, or the call is for several answers."""
LENGTH = struct.Struct("=I")


class Task(msgspec.Struct, array_like=True):
    """The function that a process runs."""

    kind: Kind
    target: str
    function: str
    memory: int
    """Limit of the process in bytes, 0 for no limit."""


class Item(msgspec.Struct, array_like=True):
    """An answer. ``metadata`` and ``messages`` are JSON. Only functions of TRL's form get more than the metadata."""

    text: bytes
    metadata: bytes | None
    messages: bytes | None = None
    prompt_text: bytes | None = None
    token_ids: Sequence[int] = ()


class Report(msgspec.Struct, omit_defaults=True):
    """Sent when a process has loaded its function, after each batch, and when the process dies."""

    is_trl: bool = False
    """Whether the function has TRL's form."""
    fault: str = ""
    """Why the code cannot be loaded, or how the process ended."""
    calls: list[Call] = []
    """The calls of a batch, in the order of its answers."""


def frame_message(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read_message(file: BinaryIO) -> bytes:
    """Return the next message, or empty bytes at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return file.read(*LENGTH.unpack(head))
