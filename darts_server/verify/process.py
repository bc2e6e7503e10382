"""A verifier's process, as the server sees it.

Libraries for pools of processes either do not kill a worker at a time limit (`concurrent.futures`, loky), or send and
time each answer alone (pebble), which is too slow for short calls. And they load results with pickle, which would let
the user's code, or an answer that attacks it, run code in the server.
"""

import asyncio
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from darts_server.types import VerifierResult
from darts_server.verify.batcher import BatchLimits, Runner, RunnerFailed
from darts_server.verify.calls import Call
from darts_server.verify.channel import RUNNING_CALL, SEVERAL_ANSWERS, Item, Report, Task, frame_message
from darts_server.verify.types import Answer

MAX_BATCH = 256
LOAD_SECONDS = 300.0
"""Importing torch from a slow disk may take minutes."""
BATCH_SECONDS = 0.005
"""Hides the time of a message."""
TRL_ANSWERS = 16
LATE_SECONDS = 0.1
"""Time to read a report that has already arrived."""
MAX_DELAY = 2.0
"""Longest pause in seconds before the restart of a process that died several times in a row."""
REPORT_BYTES = 1 << 20
"""A detail of some hundred characters for each of 256 answers."""


class Process(Runner):
    """A runner that kills its process if a call takes longer than ``timeout`` seconds."""

    def __init__(self, task: Task, timeout: float) -> None:
        self.limits = BatchLimits(MAX_BATCH, BATCH_SECONDS)
        self._task = task
        self._timeout = timeout
        self._is_trl = False
        self._starts_since_last_batch = 0
        self._call_record = memoryview(b"")
        self._process: asyncio.subprocess.Process | None = None
        self._reader = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_started(self) -> bool:
        return self._writer is not None and not self._reader.at_eof()

    async def start(self) -> None:
        await self.close()
        if self._starts_since_last_batch > 1:
            await asyncio.sleep(min(0.1 * self._starts_since_last_batch, MAX_DELAY))
        self._starts_since_last_batch += 1
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._spawn()
                report = await self._read_report()
        except OSError as error:
            # This includes the timeout.
            report = Report(fault=f"its process cannot be started within {LOAD_SECONDS:g} seconds: {error}")
        if report.fault:
            await self.close()
            raise RunnerFailed(report.fault)
        self._is_trl = report.is_trl
        if report.is_trl:
            # A call may have all answers of a batch, so a batch should take at most half of a call's timeout.
            self.limits = BatchLimits(TRL_ANSWERS, self._timeout / 2)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=REPORT_BYTES)
        with theirs, os.fdopen(os.memfd_create("darts-verifier"), "r+b") as shared_memory:
            shared_memory.truncate(RUNNING_CALL.size)
            self._call_record = memoryview(mmap.mmap(shared_memory.fileno(), RUNNING_CALL.size))
            inherited = (theirs.fileno(), shared_memory.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "darts_server.verify.worker"),
                *map(str, (*inherited, os.getpid())),
                # Whatever the user's code prints is dropped, so it can neither fill the log nor wait for a reader.
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=inherited,
                # There are many processes: threads within them would only wait for each other.
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._writer.write(frame_message(msgspec.msgpack.encode(self._task)))

    async def run(self, answers: Sequence[Answer]) -> Sequence[Call | None]:
        assert self._writer is not None
        RUNNING_CALL.pack_into(self._call_record, 0, time.monotonic(), SEVERAL_ANSWERS)
        self._writer.write(frame_message(msgspec.msgpack.encode([self._to_item(answer) for answer in answers])))
        report = await self._wait_for_report()
        if report is not None and len(report.calls) == len(answers):
            self._starts_since_last_batch = 0
            return report.calls

        failure = Call(VerifierResult.TIMEOUT, detail=f"took longer than {self._timeout:g} seconds")
        if report is not None:
            failure = Call(VerifierResult.CRASH, detail=f"ended {report.fault}")
        await self.close()
        # Only the answer whose call ran has failed.
        _, running = RUNNING_CALL.unpack_from(self._call_record)
        return [failure if index == running else None for index in range(len(answers))]

    def _to_item(self, answer: Answer) -> Item:
        prompt = answer.prompt
        item = Item(answer.text.encode(errors="replace"), prompt.metadata)
        if self._is_trl:
            item.messages = prompt.messages
            item.token_ids = list(answer.token_ids)
            if prompt.text is not None:
                item.prompt_text = prompt.text.encode(errors="replace")
        return item

    async def _wait_for_report(self) -> Report | None:
        """Return the report of a batch, or None if a call takes too long."""
        seconds_left = self._timeout
        while seconds_left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    return await self._read_report()
            # Each call of the batch has its own timeout.
            call_started_at, _ = RUNNING_CALL.unpack_from(self._call_record)
            seconds_left = call_started_at + self._timeout - time.monotonic()
        # If the event loop was busy, the report may have come in time.
        with suppress(TimeoutError):
            async with asyncio.timeout(LATE_SECONDS):
                return await self._read_report()
        return None

    async def _read_report(self) -> Report:
        """Read a report, or make one if the process ends or sends nonsense."""
        try:
            return msgspec.json.decode(await self._reader.readuntil(), type=Report)
        except (EOFError, asyncio.LimitOverrunError, msgspec.DecodeError, ConnectionError):
            return Report(fault="its process, which died")

    async def close(self) -> None:
        """Kill the process with all programs that it has started."""
        writer = self._writer
        process = self._process
        self._writer = None
        self._process = None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that has just started has no group yet. `process.kill` would reap it, which is asyncio's task.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
