"""The end of a server's lifecycle, with work that the test ends."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from darts_server.exceptions import DartsError, EngineDead, ServerStopping
from darts_server.serving.lifecycle import ANSWER_SECONDS, Lifecycle, Shutdown

pytestmark = pytest.mark.anyio
GRACE = 30.0
POLL = 0.5


class SteppedLoop(asyncio.SelectorEventLoop):
    """Timers fire at once, and the clock jumps to them."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, **more: Any) -> Any:  # type: ignore[override]  # any callback
        self.now += delay
        return super().call_later(0, callback, *args, **more)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@dataclass
class Work:
    """``lasts``: polls until it has finished. ``stuck``: it does not stop when it fails.

    ``returns``: seconds that it takes to hand it back; ``None`` if it cannot be. ``broken``: raised then.
    """

    lasts: int = 0
    stuck: bool = False
    returns: float | None = None
    broken: Exception | None = None
    drained: int = 0
    handed_back: list[DartsError] = field(default_factory=list)
    failed: list[DartsError] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        self.lasts -= 1
        return self.lasts >= 0 and (self.stuck or not self.failed)

    def drain(self) -> None:
        self.drained += 1

    async def hand_back(self, reason: DartsError) -> None:
        self.handed_back.append(reason)
        if self.broken is not None:
            raise self.broken
        if self.returns is not None:
            await asyncio.sleep(self.returns)
            self.lasts = 0

    def fail(self, error: DartsError) -> None:
        self.failed.append(error)


async def shut_down(work: Work, lifecycle: Lifecycle, error: DartsError | None = None) -> float:
    """Return the seconds from the stop to the exit. ``error``: the reason; ``None`` for a signal."""
    exited_at: list[float] = []
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(lifecycle, work, GRACE, lambda: exited_at.append(loop.time()), POLL)
    running = asyncio.create_task(shutdown.run())
    await asyncio.sleep(0)
    stopped_at = loop.time()
    if error is None:
        shutdown.begin()
    else:
        lifecycle.stop(error)
    await running
    assert len(exited_at) == 1
    return exited_at[0] - stopped_at


async def test_a_server_without_work_exits_at_once() -> None:
    work, lifecycle = Work(), Lifecycle()
    assert await shut_down(work, lifecycle) == 0
    assert not work.failed
    assert isinstance(lifecycle.stop_reason, ServerStopping)
    assert lifecycle.stop_reason.retry_after > 0


async def test_work_may_finish_within_the_grace_time() -> None:
    work = Work(lasts=10)
    assert await shut_down(work, Lifecycle()) == 10 * POLL
    assert work.drained == 1
    assert not work.failed


async def test_work_that_exceeds_the_grace_time_fails_and_its_callers_get_their_errors() -> None:
    work, lifecycle = Work(lasts=1000), Lifecycle()
    assert await shut_down(work, lifecycle) == GRACE
    assert work.failed == [lifecycle.stop_reason]
    assert await shut_down(Work(lasts=1000, stuck=True), Lifecycle()) == GRACE + ANSWER_SECONDS


async def test_work_that_exceeds_the_grace_time_is_handed_back_and_does_not_fail() -> None:
    work, lifecycle = Work(lasts=1000, returns=1.0), Lifecycle()
    assert await shut_down(work, lifecycle) == GRACE + 1.0
    assert (work.handed_back, work.failed) == ([lifecycle.stop_reason], [])
    work = Work(lasts=10, returns=1.0)
    await shut_down(work, Lifecycle())
    assert work.handed_back == [], "it has finished"


@pytest.mark.parametrize("work", [Work(lasts=1000, broken=ValueError("a bug")), Work(lasts=1000, returns=1e6)])
async def test_work_that_cannot_be_handed_back_in_time_fails(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    lifecycle = Lifecycle()
    await shut_down(work, lifecycle)
    assert work.failed == [lifecycle.stop_reason]
    assert "could not be handed back" in caplog.text


async def test_a_tracked_request_counts_as_work() -> None:
    lifecycle = Lifecycle()
    with lifecycle.track_request():
        assert await shut_down(Work(), lifecycle) == GRACE + ANSWER_SECONDS
    assert lifecycle.requests == 0


async def test_a_dead_engine_gets_no_grace_time() -> None:
    work, lifecycle, error = Work(lasts=1000), Lifecycle(), EngineDead("it was killed")
    assert await shut_down(work, lifecycle, error) == 0
    assert work.failed == [error]
    assert not work.drained
    assert not work.handed_back


async def test_the_first_stop_reason_is_kept() -> None:
    lifecycle, first = Lifecycle(), EngineDead("first")
    lifecycle.stop(first)
    lifecycle.stop(EngineDead("second"))
    assert await lifecycle.wait_for_stop() is first
