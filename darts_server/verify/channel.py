"""Messages between the server and a verifier's process.

The server sends a `Task`, and then batches of `Item`. The process answers each message with a `Report`, a line of JSON,
so nothing that it sends can run code in the server. Before each call the process writes into memory that it shares with
the server, so that the server knows how long a call takes, and for which answer.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from darts_server.verify.calls import Call
from darts_server.verify.specs import Kind

RUNNING = struct.Struct("=dq")
"""Shared memory: when the running call started, by the monotonic clock, and the index of its answer in the batch."""
SEVERAL = -1
"""In place of an index: no call runs yet, or the call is for several answers."""
LENGTH = struct.Struct("=I")


class Task(msgspec.Struct, array_like=True):
    """What a process runs. ``memory``: its limit in bytes, 0 for no limit."""

    kind: Kind
    target: str
    function: str
    memory: int


class Item(msgspec.Struct, array_like=True):
    """An answer. ``metadata`` and ``messages`` are JSON. Only functions of TRL's form get more than the metadata."""

    text: bytes
    metadata: bytes | None
    messages: bytes | None = None
    prompt_text: bytes | None = None
    token_ids: Sequence[int] = ()


class Report(msgspec.Struct, omit_defaults=True):
    """What a process says after it has loaded its function, after a batch, and when it dies.

    ``is_trl``: whether the function has TRL's form. ``fault``: why the code cannot be loaded, or how the process ended.
    ``calls``: the calls of a batch, in the order of answers.
    """

    is_trl: bool = False
    fault: str = ""
    calls: list[Call] = []


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read_frame(file: BinaryIO) -> bytes:
    """Return the next message to the process, or empty bytes at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return file.read(*LENGTH.unpack(head))
