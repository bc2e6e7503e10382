"""What a group delivers to its caller: candidates one by one, or an error."""

import asyncio


class Deliveries:
    """Queue the candidates that go to the caller, each once."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[int | BaseException] = asyncio.Queue()
        self._delivered: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self._delivered

    def __len__(self) -> int:
        """Number of candidates delivered so far, taken by the caller or not."""
        return len(self._delivered)

    @property
    def has_pending(self) -> bool:
        """Whether the caller has not taken everything that was delivered."""
        return not self._queue.empty()

    def deliver(self, index: int) -> None:
        """Deliver a candidate; harmless if it was delivered before."""
        if index not in self._delivered:
            self._delivered.add(index)
            self._queue.put_nowait(index)

    def fail(self, error: BaseException) -> None:
        """Deliver an error, in place of the candidates that are missing."""
        self._queue.put_nowait(error)

    async def take(self) -> int:
        """Wait for the next candidate, and return its index.

        Raises:
            BaseException: what `fail` was called with.
        """
        index = await self._queue.get()
        if isinstance(index, BaseException):
            raise index
        return index
