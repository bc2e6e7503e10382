"""The loop of a verifier's worker."""

import mmap
import os
import resource
import socket
import time
import traceback
from collections.abc import Sequence

import msgspec

from darts_server.types import VerifierResult
from darts_server.verify.calls import Call, call_of
from darts_server.verify.channel import RUNNING, SEVERAL, Item, Report, Task, read_frame
from darts_server.verify.functions import Function, LoadError, load, trl_key

DETAIL_CHARS = 300


def run(channel: int, table_file: int) -> None:
    """Serve batches until the server closes the socket."""
    sock = socket.socket(fileno=channel)
    file = sock.makefile("rb")
    table = memoryview(mmap.mmap(table_file, RUNNING.size))
    task = msgspec.msgpack.decode(read_frame(file), type=Task)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (task.memory, task.memory))
    try:
        function, is_trl = load(task)
        report = Report(is_trl=is_trl)
    except LoadError as error:
        report = Report(fault=str(error))
    except BaseException as error:
        report = Report(fault=f"its code cannot be loaded: {describe(error)}")

    pid = os.getpid()
    decoder = msgspec.msgpack.Decoder(list[Item])
    while True:
        sock.sendall(msgspec.json.encode(report) + b"\n")
        data = read_frame(file)
        if not data:
            return
        report = Report(calls=run_batch(function, is_trl, decoder.decode(data), table, pid))


def run_batch(
    function: Function,
    is_trl: bool,
    items: Sequence[Item],
    table: memoryview,
    pid: int,
) -> list[Call]:
    """Return the call of each answer. If a call for several answers fails, each answer is called alone."""
    # Only functions of TRL's form get several answers.
    groups: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(trl_key(item) if is_trl else index, []).append(index)
    queue = list(groups.values())
    ended: dict[int, Call] = {}
    # The queue may grow.
    for indices in queue:
        RUNNING.pack_into(table, 0, time.monotonic(), indices[0] if len(indices) == 1 else SEVERAL)
        calls = call(function, [items[index] for index in indices])
        # A fork that the user's code has left behind must not answer in the worker's name.
        if os.getpid() != pid:
            os._exit(0)
        if len(calls) < len(indices):
            queue += [[index] for index in indices]
        else:
            ended.update(zip(indices, calls, strict=True))
    return [ended[index] for index in range(len(items))]


def call(function: Function, items: Sequence[Item]) -> list[Call]:
    """Return a call for each answer, or a single call if all of them failed."""
    try:
        returned = function(items)
    except BaseException as error:
        return [Call(VerifierResult.ERROR, detail=f"raised {describe(error)}")]
    if len(returned) != len(items):
        detail = f"returned {len(returned)} rewards for {len(items)} answers"
        return [Call(VerifierResult.INVALID, detail=detail)]
    return list(map(call_of, returned))


def describe(error: BaseException) -> str:
    """Return an error's type, message and place in the user's file."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    # Not of Python's own code that imports files.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f"{text[:DETAIL_CHARS]} ({frames[-1].filename}:{frames[-1].lineno})"
