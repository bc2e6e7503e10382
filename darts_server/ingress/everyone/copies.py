"""Send the body of a request to several replicas while it arrives, without holding it in memory."""

import asyncio
from collections.abc import AsyncIterator

QUEUED_CHUNKS = 16
"""Of some 64 KiB each. The slowest replica sets the pace."""


class Copies:
    """Copies of one stream of bytes."""

    def __init__(self, source: AsyncIterator[bytes], count: int) -> None:
        self._source = source
        self._queues: list[asyncio.Queue[bytes | BaseException | None] | None]
        self._queues = [asyncio.Queue(QUEUED_CHUNKS) for _ in range(count)]

    async def run(self) -> None:
        """Read the source to its end, and pass it on. Its error ends all copies."""
        # If this is cancelled, a copy must not look whole.
        end: BaseException | None = ConnectionError("the source was not read to its end")
        try:
            async for chunk in self._source:
                await self._put(chunk)
                if not any(queue is not None for queue in self._queues):
                    return
            end = None
        except Exception as error:
            end = error
            raise
        finally:
            await self._put(end)

    async def copy(self, number: int) -> AsyncIterator[bytes]:
        """Yield the bytes for one reader."""
        queue = self._queues[number]
        assert queue is not None
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def drop(self, number: int) -> None:
        """Do not wait for a reader any more."""
        queue, self._queues[number] = self._queues[number], None
        while queue is not None and not queue.empty():
            queue.get_nowait()

    async def _put(self, item: bytes | BaseException | None) -> None:
        for queue in list(self._queues):
            if queue is not None and queue in self._queues:
                await queue.put(item)
