"""Write the ledger's changes to the disk, many with one write."""

import asyncio
from typing import Protocol

from darts_server.rollout.queue.history import Changes


class Disk(Protocol):
    """See :class:`darts_server.store.transactions.TransactionStore`, which implements it."""

    def read(self, kind: str, key: str) -> bytes | None: ...

    def write(self, changes: Changes) -> None: ...


class Saver:
    """Write changes in a thread, in their order. ``changes``: where they are collected; what is written is removed."""

    def __init__(self, disk: Disk, changes: Changes) -> None:
        self._disk = disk
        self._changes = changes
        self._writing: Changes = {}
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def save(self) -> None:
        """Wait until all changes so far are on the disk, also if the caller is cancelled.

        Raises:
            StateError: they could not be written, and are written with the next ones.
        """
        task = asyncio.get_running_loop().create_task(self._save())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def read(self, kind: str, key: str) -> bytes | None:
        """Read what is on the disk, or will be."""
        for changes in (self._changes, self._writing):
            if (kind, key) in changes:
                return changes[kind, key]
        return await asyncio.to_thread(self._disk.read, kind, key)

    async def _save(self) -> None:
        async with self._one_at_a_time:
            if not self._changes:
                return
            self._writing = dict(self._changes)
            self._changes.clear()
            try:
                await asyncio.to_thread(self._disk.write, self._writing)
            except BaseException:
                newer = dict(self._changes)
                self._changes.update(self._writing)
                self._changes.update(newer)
                raise
            finally:
                self._writing = {}
