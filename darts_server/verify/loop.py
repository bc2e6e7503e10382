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
from darts_server.verify.calls import Call, interpret_returned
from darts_server.verify.channel import RUNNING_CALL, SEVERAL_ANSWERS, Item, Report, Task, read_message
from darts_server.verify.functions import Function, LoadError, load_function, trl_call_key

DETAIL_CHARS = 300


def serve_batches(channel_fd: int, call_record_fd: int) -> None:
    """Serve batches until the server closes the socket."""
    sock = socket.socket(fileno=channel_fd)
    messages = sock.makefile("rb")
    call_record = memoryview(mmap.mmap(call_record_fd, RUNNING_CALL.size))
    task = msgspec.msgpack.decode(read_message(messages), type=Task)
    # A crash of the user's code must not write a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (task.memory, task.memory))
    try:
        function, is_trl = load_function(task)
        report = Report(is_trl=is_trl)
    except LoadError as error:
        report = Report(fault=str(error))
    except BaseException as error:
        report = Report(fault=f"its code cannot be loaded: {describe_error(error)}")

    worker_pid = os.getpid()
    decoder = msgspec.msgpack.Decoder(list[Item])
    while True:
        sock.sendall(msgspec.json.encode(report) + b"\n")
        batch = read_message(messages)
        if not batch:
            return
        # After a fault the server sends no batch.
        report = Report(calls=run_batch(function, is_trl, decoder.decode(batch), call_record, worker_pid))


def run_batch(
    function: Function,
    is_trl: bool,
    items: Sequence[Item],
    call_record: memoryview,
    worker_pid: int,
) -> list[Call]:
    # Only functions of TRL's form get several answers in a call.
    indices_by_key: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        key = trl_call_key(item) if is_trl else index
        indices_by_key.setdefault(key, []).append(index)
    queue = list(indices_by_key.values())
    call_of_index: dict[int, Call] = {}
    for indices in queue:
        running = indices[0] if len(indices) == 1 else SEVERAL_ANSWERS
        # The server reads this if the call takes too long or the process dies.
        RUNNING_CALL.pack_into(call_record, 0, time.monotonic(), running)
        calls = call_function(function, [items[index] for index in indices])
        # A fork that the user's code has left behind must not answer in the worker's name.
        if os.getpid() != worker_pid:
            os._exit(0)
        if len(calls) < len(indices):
            # The call failed, so the end of the queue gets a call for each of its answers.
            queue += [[index] for index in indices]
        else:
            call_of_index.update(zip(indices, calls, strict=True))
    return [call_of_index[index] for index in range(len(items))]


def call_function(function: Function, items: Sequence[Item]) -> list[Call]:
    """Return a call for each answer, or a single call if all of them failed."""
    try:
        returned = function(items)
    except BaseException as error:
        return [Call(VerifierResult.ERROR, detail=f"raised {describe_error(error)}")]
    if len(returned) != len(items):
        detail = f"returned {len(returned)} rewards for {len(items)} answers"
        return [Call(VerifierResult.INVALID, detail=detail)]
    return list(map(interpret_returned, returned))


def describe_error(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        # The user's exception has a faulty `__str__`.
        text = type(error).__name__
    # Frames such as <frozen importlib._bootstrap> are Python's own.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f"{text[:DETAIL_CHARS]} ({frames[-1].filename}:{frames[-1].lineno})"
