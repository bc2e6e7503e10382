"""The end of a server's life, with work that the test ends."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from darts_server.exceptions import DartsError, EngineDead, ServerStopping
from darts_server.serving.lifecycle import ANSWER_SECONDS, Ending, Life

pytestmark = pytest.mark.anyio
GRACE = 30.0
LOOK = 0.5


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its timers are due at once, and its clock is where they are due."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        self.now += delay
        return super().call_later(0, callback, *args, **more)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@dataclass
class Work:
    """``lasts``: looks until it has ended by itself. ``stuck``: it does not even end when it fails."""

    lasts: int = 0
    stuck: bool = False
    hurried: int = 0
    failed: list[DartsError] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        self.lasts -= 1
        return self.lasts >= 0 and (self.stuck or not self.failed)

    def hurry(self) -> None:
        self.hurried += 1

    def fail(self, error: DartsError) -> None:
        self.failed.append(error)


async def end(work: Work, life: Life, error: DartsError | None = None) -> float:
    """Seconds from the end of the life to the end of the server; ``None`` for one that is told to stop."""
    left: list[float] = []
    loop = asyncio.get_running_loop()
    ending = Ending(life, work, GRACE, lambda: left.append(loop.time()), LOOK)
    running = asyncio.create_task(ending.run())
    await asyncio.sleep(0)
    began = loop.time()
    if error is None:
        ending.stop()
    else:
        life.end(error)
    await running
    assert len(left) == 1
    return left[0] - began


async def test_a_server_without_work_goes_at_once() -> None:
    work, life = Work(), Life()
    assert await end(work, life) == 0
    assert not work.failed
    assert isinstance(life.over, ServerStopping)
    assert life.over.retry_after > 0


async def test_work_may_end_within_the_grace_time() -> None:
    work = Work(lasts=10)
    assert await end(work, Life()) == 10 * LOOK
    assert work.hurried == 1
    assert not work.failed


async def test_what_has_not_ended_then_fails_and_its_callers_get_a_moment() -> None:
    work, life = Work(lasts=1000), Life()
    assert await end(work, life) == GRACE
    assert work.failed == [life.over]
    assert await end(Work(lasts=1000, stuck=True), Life()) == GRACE + ANSWER_SECONDS


async def test_a_request_that_is_inside_counts_as_work() -> None:
    life = Life()
    with life.inside():
        assert await end(Work(), life) == GRACE + ANSWER_SECONDS
    assert life.requests == 0


async def test_a_dead_engine_is_given_no_time() -> None:
    work, life, error = Work(lasts=1000), Life(), EngineDead("it was killed")
    assert await end(work, life, error) == 0
    assert work.failed == [error]
    assert not work.hurried


async def test_of_several_reasons_the_first_stays() -> None:
    life, first = Life(), EngineDead("first")
    life.end(first)
    life.end(EngineDead("second"))
    assert await life.ended() is first
