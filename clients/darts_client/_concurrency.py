"""Running many jobs at once, each result given as it comes, none left behind."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def as_completed(
    jobs: Sequence[Callable[[], Awaitable[T]]], *, concurrency: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield `(index, result)` of each job as it ends, with at most `concurrency` running.

    A job's error is raised in its turn. However the iteration ends, every job has ended when it does: those still
    running are cancelled and awaited. Jobs go on while the consumer is busy with a result.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    slots = asyncio.Semaphore(concurrency)
    ended: asyncio.Queue[asyncio.Task[tuple[int, T]]] = asyncio.Queue()

    async def run(index: int, job: Callable[[], Awaitable[T]]) -> tuple[int, T]:
        async with slots:
            return index, await job()

    # Not a TaskGroup: that must be left by the task that entered it, and a generator may be closed by another.
    tasks = [asyncio.create_task(run(index, job)) for index, job in enumerate(jobs)]
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    try:
        for _ in tasks:
            yield (await ended.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
