"""Messages between the server and a verifier's process.

The server sends a `Task`, and then batches of `Item`. The process answers each message with a `Report`, a line of JSON.
Rewards stand in a table in shared memory, which stays readable if the process is killed: each answer of a batch has a
record. Nothing that the process sends can run code in the server.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from darts_server.types import VerifierResult
from darts_server.verify.calls import Call
from darts_server.verify.specs import Kind

MAX_BATCH = 256
"""Answers in one message."""
RECORD = struct.Struct("=dd4b4x")
"""Record of an answer: the reward, the time of the last change, state, result, correct, and unused bytes."""
TABLE_BYTES = MAX_BATCH * RECORD.size
WAITING = 0
RUNNING = 1
DONE = 2
LENGTH = struct.Struct("=I")
RESULTS = tuple(VerifierResult)
UNKNOWN = -1
"""Value of ``correct`` in a record if the verifier does not say."""


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
    ``details``: why answers have no reward, by their index.
    """

    is_trl: bool = False
    fault: str = ""
    details: dict[int, str] = {}


def write_record(
    table: memoryview,
    index: int,
    state: int,
    now: float,
    call: Call | None = None,
) -> None:
    """Write the record of answer ``index``. ``call``: only if the state is `DONE`."""
    reward = 0.0
    result = 0
    correct = UNKNOWN
    if call is not None:
        reward = call.reward or 0.0
        result = RESULTS.index(call.result)
        if call.correct is not None:
            correct = int(call.correct)
    RECORD.pack_into(table, index * RECORD.size, reward, now, state, result, correct, 0)


def read_record(table: memoryview, index: int) -> tuple[int, float, Call]:
    """Return the state, the time of its last change, and the call, which is valid if the state is `DONE`."""
    reward, changed, state, result, correct, _ = RECORD.unpack_from(table, index * RECORD.size)
    kind = RESULTS[result]
    return (
        state,
        changed,
        Call(
            kind,
            reward if kind is VerifierResult.REWARD else None,
            None if correct == UNKNOWN else bool(correct),
        ),
    )


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read_frame(file: BinaryIO) -> bytes:
    """Return the next message to the process, or empty bytes at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    return file.read(*LENGTH.unpack(head))
