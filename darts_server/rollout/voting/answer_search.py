"""Find answers in texts by patterns of callers, in a process of its own that can be ended."""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.policy.voting.answers import TEXT_CHARS

logger = logging.getLogger(__name__)

SEARCH_SECONDS = 0.5
"""Processor time for one text. A pattern that is linear in the text takes some milliseconds for the longest text, and
one that is quadratic in it 0.2 seconds."""
REPLY_SECONDS = 30.0
"""Real time for one reply: the process may have to wait for a processor, and to start first."""
MAX_REPLY_BYTES = 1 << 20
"""An answer has at most `TEXT_CHARS`, of 12 bytes each in JSON."""
COMMAND = (sys.executable, "-m", "darts_server.rollout.voting.search_process")

Pattern = str | Sequence[str]
"""See `policy.voting.answers.create_extractor`."""


class AnswerFinder(Protocol):
    """Finds answers by patterns, which come from callers."""

    async def check(self, pattern: Pattern) -> None:
        """Check whether the pattern can be used.

        Raises:
            InvalidRequest: it cannot.
        """
        ...

    async def find(self, pattern: Pattern, text: str) -> str | None:
        """Find the answer in ``text``.

        Raises:
            InvalidRequest: the pattern cannot be used, or takes too long.
        """
        ...


class AnswerSearch:
    """Find answers in a process that is started for the first one, and again after it has died.

    Searches run one after the other. One that takes too long ends the process, and thereby itself, but no other search.

    Args:
        seconds: processor time for one text.
        command: runs the process; ``seconds`` are appended.
    """

    def __init__(self, seconds: float = SEARCH_SECONDS, command: Sequence[str] = COMMAND) -> None:
        self._seconds = seconds
        self._command = (*command, str(seconds))
        self._process: _SearchProcess | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process; ``None`` while there is none."""
        return None if self._process is None else self._process.pid

    async def check(self, pattern: Pattern) -> None:
        """See `AnswerFinder`."""
        await self._request({"pattern": pattern})

    async def find(self, pattern: Pattern, text: str) -> str | None:
        """See `AnswerFinder`."""
        answer: str | None = await self._request({"pattern": pattern, "text": text[-TEXT_CHARS:]})
        return answer

    def close(self) -> None:
        """Kill the process, and start no other until the next request."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def _request(self, fields: dict[str, Any]) -> Any:
        async with self._turn:
            reply = await self._exchange(fields) or await self._exchange(fields)
        if not reply:
            raise DartsError("the process that finds answers died twice; see the log")
        message = json.loads(reply)
        if "field" in message:
            raise InvalidRequest(message["field"], message["message"])
        return message["answer"]

    async def _exchange(self, fields: dict[str, Any]) -> bytes:
        """Send a request and receive its reply; empty if the process died.

        Raises:
            InvalidRequest: the search took too long.
            DartsError: the process does not reply.
        """
        process = self._process = self._process or await _SearchProcess.start(self._command)
        reply = b""
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                reply = await process.exchange(json.dumps(fields).encode() + b"\n")
        except TimeoutError as error:
            raise DartsError(f"the process that finds answers did not reply in {REPLY_SECONDS:g} seconds") from error
        finally:
            if not reply:  # also when cancelled: the next request would get the reply to this one
                self.close()
        if process.code == -signal.SIGPROF:
            raise InvalidRequest(
                "pattern",
                f"took more than {self._seconds:g} seconds of processor time to find the answer of one trajectory, and "
                "the vote was ended; use a simpler pattern",
            )
        if not reply:
            logger.warning("the process that finds answers ended with code %s and is started again", process.code)
        return reply


class _SearchProcess:
    """A running process, and the connection to it."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_SearchProcess":
        ours, its = socket.socketpair()
        with its:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES)
            return cls(subprocess.Popen(command, stdin=its.fileno(), stdout=its.fileno()), reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended, as `subprocess.Popen.returncode`."""
        return self._process.returncode

    async def exchange(self, line: bytes) -> bytes:
        """Send a line and receive one; empty if the process has died."""
        self._writer.write(line)
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""

    def kill(self) -> None:
        """Kill the process, if it still runs, and wait for its end."""
        self._writer.close()
        self._process.kill()
        self._process.wait()
