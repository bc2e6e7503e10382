"""Consumers that wait for groups."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from darts_server.exceptions import QuotaReached
from darts_server.rollout.queue.entries import JobId
from darts_server.rollout.queue.owners import RETRY_SECONDS

MAX_CONSUMERS = 256
"""Of each owner: each looks at its job when that changes."""


class Consumers:
    """Notify consumers of changes of their job."""

    def __init__(self) -> None:
        self._waiting: dict[JobId, set[asyncio.Future[None]]] = {}
        self._counts: Counter[str] = Counter()

    @contextmanager
    def count(self, owner: str) -> Iterator[None]:
        """Count a consumer until the block ends.

        Raises:
            QuotaReached: the owner has too many.
        """
        if self._counts[owner] >= MAX_CONSUMERS:
            raise QuotaReached(
                f"this key has {MAX_CONSUMERS} requests that take groups; take more with each, and retry", RETRY_SECONDS
            )
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]

    async def wait(self, job_id: JobId, seconds: float) -> None:
        """Wait until a job has changed, or for so long."""
        waiting = self._waiting.setdefault(job_id, set())
        future = asyncio.get_running_loop().create_future()
        waiting.add(future)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await future
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(job_id) is waiting:
                del self._waiting[job_id]

    def notify(self, job_ids: Iterable[JobId]) -> None:
        """Wake the consumers of jobs up."""
        for job_id in job_ids:
            for future in self._waiting.get(job_id, ()):
                if not future.done():
                    future.set_result(None)

    def notify_all(self) -> None:
        self.notify(self._waiting)
