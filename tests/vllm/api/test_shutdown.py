"""The shutdown of a server, without an engine."""

import asyncio
import faulthandler
import logging
import os
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from darts_server.exceptions import DartsError, EngineDead, ServerStopping
from darts_server.rollout.batches.carried import PORTABLE_SECONDS, SAVE_SECONDS
from darts_server.rollout.batches.registry import CLOSE_SECONDS
from darts_server.serving.lifecycle import ANSWER_SECONDS, END_SECONDS, HAND_BACK_SECONDS, Lifecycle
from darts_server.vllm.api import shutdown
from darts_server.vllm.api.shutdown import POLL_SECONDS, Shutdown, cause_of_death

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("ours", "vllms", "seconds"), [(None, 0, 30.0), (None, 45, 45.0), (2.5, 45, 2.5), (0.0, 0, 0.0)]
)
def test_our_grace_time_overrides_vllms_and_the_engine_outlives_it(
    ours: float | None, vllms: int, seconds: float
) -> None:
    args = Namespace(shutdown_timeout=vllms)
    assert shutdown.set_grace_seconds(args, ours) == seconds
    assert seconds <= args.shutdown_timeout - HAND_BACK_SECONDS < seconds + 1, "the engine outlives what is handed back"


def test_a_server_ends_before_a_supervisor_kills_it() -> None:
    """Even if every step takes its whole time, and writing learned state takes a second."""
    handed_back = HAND_BACK_SECONDS + ANSWER_SECONDS + shutdown.CONNECTION_SECONDS
    closed = CLOSE_SECONDS + PORTABLE_SECONDS + SAVE_SECONDS + shutdown.CHILD_GRACE_SECONDS
    assert handed_back + closed + 1.0 < END_SECONDS


@pytest.mark.parametrize(
    ("over", "died", "lost", "code", "says"),
    [
        (None, False, 0, 0, None),
        (ServerStopping("stopping", 30), True, 0, 0, None),
        (ServerStopping("stopping", 30), False, 2, 3, "2 prompts"),
        (EngineDead("the engine is hung"), False, 0, 1, "the engine is hung"),
        (EngineDead("the engine is hung"), False, 2, 1, "the engine is hung"),
        (None, True, 0, 1, "the engine died: EngineCore was killed"),
    ],
)
def test_the_exit_code_and_the_last_line_say_why(
    over: Any, died: bool, lost: int, code: int, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    manager = SimpleNamespace(finished_procs=lambda: {"EngineCore": -signal.SIGKILL})
    llm: Any = SimpleNamespace(
        died=died, engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    )
    lifecycle = Lifecycle()
    if over is not None:
        lifecycle.stop(over)
    assert shutdown.exit_code(llm, lifecycle, lost) == code
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL] * (says is not None)
    assert says is None or caplog.messages[0].startswith(says)


# --- Scripted work, on a clock that jumps


GRACE = 30.0


class SteppedLoop(asyncio.SelectorEventLoop):
    """Timers fire at once, and the clock jumps to them."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, **more: Any) -> Any:  # type: ignore[override]  # any callback
        self.now += delay
        return super().call_later(0, callback, *args, **more)


@dataclass
class Work:
    """Stands in for the engine and its work.

    ``lasts``: polls until the work has finished. ``stuck``: whether it goes on after it was failed. ``returns``:
    seconds until it is handed back, or None if it cannot be. ``broken``: error of handing it back.
    """

    lasts: int = 0
    stuck: bool = False
    returns: float | None = None
    broken: Exception | None = None
    drained: int = 0
    handed_back: list[DartsError] = field(default_factory=list)
    failed: list[DartsError] = field(default_factory=list)
    ended_sessions: list[DartsError] = field(default_factory=list)
    rollouts: None = None

    @property
    def admission(self) -> Any:
        self.lasts -= 1
        return SimpleNamespace(unanswered_requests=int(self.lasts >= 0 and (self.stuck or not self.failed)))

    def drain(self) -> None:
        self.drained += 1

    async def hand_back(self, reason: DartsError | None = None) -> None:
        # Without a reason, this is the call of the engine, not of batches.
        if reason is None:
            return
        self.handed_back.append(reason)
        if self.broken is not None:
            raise self.broken
        if self.returns is not None:
            await asyncio.sleep(self.returns)
            self.lasts = 0

    def fail(self, error: DartsError) -> None:
        self.failed.append(error)

    def end_sessions(self, error: DartsError) -> None:
        self.ended_sessions.append(error)


def shut_down(work: Any, lifecycle: Lifecycle, error: DartsError | None = None) -> float:
    """Return the seconds from the stop to the exit. ``error``: reason of the stop, or None for a signal."""

    async def run() -> float:
        exited_at: list[float] = []
        loop = asyncio.get_running_loop()
        shutdown = Shutdown(lifecycle, work, work, GRACE)
        running = asyncio.create_task(shutdown.run(lambda: exited_at.append(loop.time())))
        await asyncio.sleep(0)
        stopped_at = loop.time()
        if error is None:
            shutdown.handle_signal(signal.SIGTERM)
        else:
            lifecycle.stop(error)
        await running
        [exited] = exited_at
        return exited - stopped_at

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        return runner.run(run())


def test_the_first_signal_stops_in_order_and_the_second_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exited: list[int] = []
    monkeypatch.setattr(shutdown, "exit_at_once", exited.append)
    work: Any = Work()
    lifecycle = Lifecycle()
    stop = Shutdown(lifecycle, work, work, GRACE)
    for expected in ([], [signal.SIGTERM]):
        stop.handle_signal(signal.SIGTERM)
        assert exited == expected
    assert isinstance(lifecycle.stop_reason, ServerStopping)
    assert lifecycle.stop_reason.retry_after


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the handlers of this process's signals."""
    numbers = (*shutdown.SIGNALS, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.usefixtures("restored")
def test_a_signal_to_a_forked_engine_does_not_reach_the_server() -> None:
    async def run() -> tuple[int, bool]:
        shutdown.exit_on_signals()
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            os.write(writer, b"1")
            time.sleep(60)
            os._exit(1)
        await asyncio.to_thread(os.read, reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        # The signal would arrive within this time.
        await asyncio.sleep(0.05)
        os.close(reader)
        os.close(writer)
        return os.waitstatus_to_exitcode(status), received.is_set()

    assert uvloop.run(run()) == (7, False)


def test_work_may_finish_within_the_grace_time() -> None:
    assert shut_down(Work(), Lifecycle()) == 0
    work = Work(lasts=10, returns=1.0)
    assert shut_down(work, Lifecycle()) == pytest.approx(10 * POLL_SECONDS)
    assert (work.drained, work.handed_back, work.failed) == (1, [], [])
    assert [str(error) for error in work.ended_sessions] == [
        "the server is stopping; send this request to another server, or retry later"
    ]


def test_work_that_exceeds_the_grace_time_is_handed_back_and_does_not_fail() -> None:
    work = Work(lasts=1000, returns=1.0)
    lifecycle = Lifecycle()
    assert shut_down(work, lifecycle) == pytest.approx(GRACE + 1.0, abs=POLL_SECONDS)
    assert (work.handed_back, work.failed) == ([lifecycle.stop_reason], [])


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(lasts=1000), GRACE),
        (Work(lasts=1000, stuck=True), GRACE + ANSWER_SECONDS),
        (Work(lasts=1000, broken=ValueError("a bug")), GRACE),
        (Work(lasts=1000, returns=1e6), GRACE + HAND_BACK_SECONDS),
    ],
)
def test_work_that_is_not_handed_back_in_time_fails_and_its_callers_get_their_errors(
    work: Work, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = Lifecycle()
    assert shut_down(work, lifecycle) >= seconds - POLL_SECONDS
    assert work.failed == [lifecycle.stop_reason] * 2, "batches and other requests"
    assert ("could not be handed back" in caplog.text) is (work.broken is not None or work.returns is not None)


def test_a_request_that_is_being_handled_counts_as_work() -> None:
    lifecycle = Lifecycle()
    lifecycle.requests += 1
    assert shut_down(Work(), lifecycle) == pytest.approx(GRACE + ANSWER_SECONDS, abs=2 * POLL_SECONDS)


def test_a_dead_engine_gets_no_grace_time_and_the_first_reason_is_kept() -> None:
    work = Work(lasts=1000)
    lifecycle = Lifecycle()
    error = EngineDead("it was killed")
    assert shut_down(work, lifecycle, error) == 0
    lifecycle.stop(EngineDead("second"))
    assert (lifecycle.stop_reason, work.failed) == (error, [error] * 2)
    assert (work.drained, work.handed_back) == (0, [])


# --- The watchdog, with a scripted engine


async def test_only_an_engine_that_has_requests_and_sends_nothing_is_hung() -> None:
    class Engine:
        """Has no requests for 20 polls. Sends messages for 40 polls, and then none."""

        looks = 0
        received_messages = 0

        @property
        def held_requests(self) -> Any:
            return self

        @property
        def should_respond(self) -> bool:
            self.looks += 1
            self.received_messages += self.looks <= 40
            return self.looks > 20

    engine: Any = Engine()
    lifecycle = Lifecycle()
    async with asyncio.timeout(30):
        await Shutdown(lifecycle, engine, engine, grace=0.0, watchdog=0.05).watch_engine()
    assert "sent nothing for 0.05 s" in str(lifecycle.stop_reason)
    assert engine.looks >= 50


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ({"EngineCore": -9}, "EngineCore was killed (SIGKILL), most often because the machine has no memory left"),
        ({"EngineCore_DP0": 0, "EngineCore_DP1": -11}, "EngineCore_DP1 was ended by SIGSEGV"),
        ({"EngineCore": 1}, "EngineCore ended with exit code 1"),
        ({}, "further up in the log"),
        # The engine runs on another machine.
        (None, "further up in the log"),
    ],
)
def test_the_cause_of_death_is_read_from_the_processes_that_ended(codes: dict[str, int] | None, says: str) -> None:
    manager = None if codes is None else SimpleNamespace(finished_procs=lambda: codes)
    assert says in cause_of_death(SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)))
