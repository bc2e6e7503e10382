"""The loop of a verifier's worker: read answers, run the user's function, write rewards into the table."""

import mmap
import os
import resource
import socket
import time
import traceback
from collections.abc import Iterator, Sequence

import msgspec

from darts_server.types import VerifierResult
from darts_server.verify.calls import Call, call_of
from darts_server.verify.channel import (
    DONE,
    RUNNING,
    TABLE_BYTES,
    WAITING,
    Item,
    Report,
    Task,
    read_frame,
    write_record,
)
from darts_server.verify.functions import Function, LoadError, load, trl_key

DETAIL_CHARS = 300


def run(channel_fd: int, table_fd: int) -> None:
    """Serve batches until the server closes the socket. Never returns after the user's code has forked this process."""
    sock = socket.socket(fileno=channel_fd)
    file = sock.makefile("rb")
    table = memoryview(mmap.mmap(table_fd, TABLE_BYTES))
    task = msgspec.msgpack.decode(read_frame(file), type=Task)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (task.memory, task.memory))
    try:
        function, is_trl = load(task)
    except BaseException as error:
        sock.sendall(_encode(Report(error=describe(error))))
        return
    sock.sendall(_encode(Report(is_trl=is_trl)))

    worker = Worker(function, is_trl, table)
    decoder = msgspec.msgpack.Decoder(list[Item])
    while data := read_frame(file):
        sock.sendall(_encode(worker.run(decoder.decode(data))))


def _encode(report: Report) -> bytes:
    return msgspec.json.encode(report) + b"\n"


class Worker:
    """Runs the function on batches of answers."""

    def __init__(self, function: Function, is_trl: bool, table: memoryview) -> None:
        self._function = function
        self._is_trl = is_trl
        self._table = table
        self._pid = os.getpid()
        self._described: set[VerifierResult] = set()
        self._details: dict[int, str] = {}

    def run(self, items: Sequence[Item]) -> Report:
        self._details = {}
        for indices in self._calls(items):
            self._call(items, indices)
        return Report(details=self._details)

    def _calls(self, items: Sequence[Item]) -> Iterator[list[int]]:
        """Yield the indices of the answers of each call."""
        if not self._is_trl:
            yield from ([index] for index in range(len(items)))
            return
        by_key: dict[object, list[int]] = {}
        for index, item in enumerate(items):
            by_key.setdefault(trl_key(item), []).append(index)
        yield from by_key.values()

    def _call(self, items: Sequence[Item], indices: Sequence[int]) -> None:
        """Call the function. If it fails on several answers, call it for each answer alone."""
        started = time.monotonic()
        for index in indices:
            write_record(self._table, index, RUNNING, started)
        failure = None
        returned: Sequence[object] = []
        try:
            returned = self._function([items[index] for index in indices])
            if len(returned) != len(indices):
                detail = f"returned {len(returned)} rewards for {len(indices)} answers"
                failure = Call(VerifierResult.INVALID, detail=detail)
        except BaseException as error:
            failure = Call(VerifierResult.ERROR, detail=f"raised {describe(error)}")
        # A fork that the user's code has left behind must not answer in the worker's name.
        if os.getpid() != self._pid:
            os._exit(0)

        if failure is None:
            calls = [call_of(each) for each in returned]
        elif len(indices) == 1:
            calls = [failure]
        else:
            for index in indices:
                write_record(self._table, index, WAITING, time.monotonic())
            for index in indices:
                self._call(items, [index])
            return
        for index, call in zip(indices, calls, strict=True):
            write_record(self._table, index, DONE, time.monotonic(), call)
            if call.detail and call.result not in self._described:
                self._described.add(call.result)
                self._details[index] = call.detail


def describe(error: BaseException) -> str:
    """Return an error's type, message and place in the user's file."""
    if isinstance(error, LoadError):
        return str(error)
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return text[:DETAIL_CHARS] + place
