import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import pytest

from darts_client._io import as_completed, write_atomically


class Jobs:
    """Jobs that wait until they are released, and record their state."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.running: set[int] = set()
        self.max_running = 0
        self.cancelled: set[int] = set()

    async def run(self, name: int) -> int:
        self.running.add(name)
        self.max_running = max(self.max_running, len(self.running))
        try:
            await self.gates.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.add(name)
            raise
        finally:
            self.running.discard(name)
        return name * 10

    def release(self, name: int) -> None:
        self.gates.setdefault(name, asyncio.Event()).set()


@pytest.mark.anyio
async def test_results_are_in_the_order_of_completion_with_their_index() -> None:
    jobs = Jobs()
    results = as_completed([partial(jobs.run, name) for name in range(3)], concurrency=3)
    seen = []
    for name in (2, 0, 1):
        jobs.release(name)
        seen.append(await anext(results))
    assert seen == [(2, 20), (0, 0), (1, 10)]
    with pytest.raises(StopAsyncIteration):
        await anext(results)


@pytest.mark.anyio
async def test_no_more_jobs_run_than_the_concurrency() -> None:
    jobs = Jobs()
    for name in range(10):
        jobs.release(name)

    async def slow(name: int) -> int:
        result = await jobs.run(name)
        await asyncio.sleep(0)
        return result

    assert len([_ async for _ in as_completed([partial(slow, name) for name in range(10)], concurrency=3)]) == 10
    assert jobs.max_running <= 3


@pytest.mark.anyio
async def test_an_error_ends_the_iteration_and_cancels_the_other_jobs() -> None:
    jobs = Jobs()

    async def fail() -> int:
        while len(jobs.running) < 2:
            await asyncio.sleep(0)
        raise RuntimeError("no")

    work: list[Callable[[], Awaitable[int]]] = [partial(jobs.run, 0), fail, partial(jobs.run, 2)]
    with pytest.raises(RuntimeError, match="no"):
        async for _ in as_completed(work, concurrency=3):
            pass
    assert jobs.cancelled == {0, 2}


@pytest.mark.anyio
async def test_closing_early_cancels_the_other_jobs_and_waits_for_them() -> None:
    jobs = Jobs()
    jobs.release(1)
    async with aclosing(as_completed([partial(jobs.run, name) for name in range(4)], concurrency=2)) as results:
        async for _ in results:
            break
    assert not jobs.running
    assert 0 in jobs.cancelled


@pytest.mark.anyio
async def test_cancelling_the_consumer_cancels_the_jobs() -> None:
    jobs = Jobs()

    async def consume() -> None:
        async for _ in as_completed([partial(jobs.run, name) for name in range(2)], concurrency=2):
            pass

    consumer = asyncio.create_task(consume())
    while len(jobs.running) < 2:
        await asyncio.sleep(0)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert jobs.cancelled == {0, 1}


@pytest.mark.anyio
async def test_without_jobs_the_iteration_ends_at_once() -> None:
    none: list[Callable[[], Awaitable[int]]] = []
    assert [result async for result in as_completed(none, concurrency=1)] == []


@pytest.mark.anyio
async def test_a_concurrency_of_0_is_rejected() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        await anext(as_completed([partial(Jobs().run, 0)], concurrency=0))


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"new", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []
