"""Hold new requests while the replicas change."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Hold:
    """Whether new requests wait."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let new requests wait until the block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def wait(self) -> None:
        """Wait until requests may start."""
        await self._open.wait()
