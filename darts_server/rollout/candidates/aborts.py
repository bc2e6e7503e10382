"""Requests to abort single candidates of a running group."""

import asyncio
from collections.abc import Iterator
from typing import Generic

from darts_server.engine.port import OutputT


class AbortRequests(Generic[OutputT]):
    """Keep who waits for what an aborted candidate has generated, by index. All that abort one share a future."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[OutputT | None]] = {}

    def __contains__(self, index: int) -> bool:
        """Whether the candidate was aborted, answered or not."""
        return index in self._waiting

    def __iter__(self) -> Iterator[int]:
        """Iterate over the candidates that were aborted, answered or not."""
        return iter(self._waiting)

    @property
    def pending(self) -> list[int]:
        """Candidates whose abort is not answered yet."""
        return [index for index, waiting in self._waiting.items() if not waiting.done()]

    def find(self, index: int) -> asyncio.Future[OutputT | None] | None:
        """Return the future of a candidate whose abort is not answered yet; ``None`` without one."""
        waiting = self._waiting.get(index)
        return None if waiting is None or waiting.done() else waiting

    def add(self, index: int, waiting: asyncio.Future[OutputT | None]) -> None:
        """Add the future that `answer` sets."""
        self._waiting[index] = waiting

    def answer(self, index: int, output: OutputT | None) -> None:
        """Answer those that have aborted a candidate, if any. ``None``: it has ended otherwise."""
        if (waiting := self.find(index)) is not None:
            waiting.set_result(output)

    def was_taken(self, index: int) -> bool:
        """Whether those that have aborted a candidate have got what it had generated."""
        waiting = self._waiting.get(index)
        return waiting is not None and waiting.done() and waiting.result() is not None
