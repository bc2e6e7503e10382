"""The end of a server, without an engine."""

import asyncio
import faulthandler
import logging
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.exceptions import EngineHung, ServerStopping
from darts_server.rollout.batches.carried import PORTABLE_SECONDS, SAVE_SECONDS
from darts_server.rollout.batches.registry import CLOSE_SECONDS
from darts_server.serving.lifecycle import ANSWER_SECONDS, END_SECONDS, HAND_BACK_SECONDS, Lifecycle, Shutdown
from darts_server.vllm import shutdown
from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.shutdown import cause_of_death, wait_until_hung

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("ours", "vllms", "seconds"), [(None, 0, 30.0), (None, 45, 45.0), (2.5, 45, 2.5), (0.0, 0, 0.0)]
)
def test_both_grace_times_are_the_same_and_ours_goes_first(ours: float | None, vllms: int, seconds: float) -> None:
    args = Namespace(shutdown_timeout=vllms)
    assert shutdown.set_grace_seconds(args, ours) == seconds
    assert seconds <= args.shutdown_timeout - HAND_BACK_SECONDS < seconds + 1, "the engine outlives what is handed back"


def test_a_server_has_ended_by_the_time_that_a_supervisor_kills_it() -> None:
    """Also if everything takes as long as it may, and learned state a second."""
    handed_back = HAND_BACK_SECONDS + ANSWER_SECONDS + shutdown.CONNECTION_SECONDS
    closed = CLOSE_SECONDS + PORTABLE_SECONDS + SAVE_SECONDS + shutdown.CHILD_GRACE_SECONDS
    assert handed_back + closed + 1.0 < END_SECONDS


def test_the_first_signal_stops_in_order_and_the_second_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(shutdown, "exit_at_once", left.append)
    lifecycle = Lifecycle()
    stop = Shutdown(lifecycle, Mock(), 30.0, Mock())
    shutdown._handle_signal(signal.SIGTERM, stop, lifecycle)
    assert isinstance(lifecycle.stop_reason, ServerStopping)
    assert not left
    shutdown._handle_signal(signal.SIGTERM, stop, lifecycle)
    assert left == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("over", "died", "lost", "code", "says"),
    [
        (None, False, 0, 0, None),
        (ServerStopping("stopping", 30), True, 0, 0, None),
        (ServerStopping("stopping", 30), False, 2, 3, "2 prompts"),
        (EngineHung("the engine is hung"), False, 0, 1, "the engine is hung"),
        (EngineHung("the engine is hung"), False, 2, 1, "the engine is hung"),
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


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the handlers of this process's signals."""
    numbers = (*shutdown.SIGNALS, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.anyio
@pytest.mark.usefixtures("restored")
async def test_sighup_reloads_keys_or_is_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    shutdown.exit_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    for reload in (Mock(), None):
        shutdown.handle_sighup(reload)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while not (reload.called if reload else caplog.messages):
                await asyncio.sleep(0.01)
    assert caplog.messages == ["SIGHUP: ignored, since the server has no key files to reload"]
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


# --- The watchdog, with an engine that the test plays


LIMIT = 0.05


async def test_an_engine_that_works_and_says_nothing_is_hung() -> None:
    silent: Any = SimpleNamespace(should_respond=True)
    async with asyncio.timeout(30):
        await wait_until_hung(silent, LIMIT)


async def test_one_that_speaks_or_has_nothing_to_do_is_not() -> None:
    """Until the moment when it neither speaks nor rests."""

    class Engine:
        looks = 0
        has_sent = False

        @property
        def should_respond(self) -> bool:
            self.looks += 1
            self.has_sent = self.looks <= 40
            return self.looks > 20

    engine: Any = Engine()
    async with asyncio.timeout(30):
        await wait_until_hung(engine, LIMIT)
    assert engine.looks >= 50


async def test_its_death_is_heard() -> None:
    said: list[Any] = ["tokens", EngineDeadError()]

    async def get_output() -> Any:
        if isinstance(output := said.pop(0), Exception):
            raise output
        return output

    deaths: list[int] = []
    engine_core = SimpleNamespace(get_output_async=get_output)
    llm: Any = SimpleNamespace(engine_core=engine_core, on_death=lambda: deaths.append(1))
    ShapingLLM.observe_outputs(llm)
    assert await engine_core.get_output_async() == "tokens"
    assert not deaths
    with pytest.raises(EngineDeadError):
        await engine_core.get_output_async()
    assert deaths == [1]


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ({"EngineCore": -9}, "EngineCore was killed (SIGKILL), most often because the machine has no memory left"),
        ({"EngineCore_DP0": 0, "EngineCore_DP1": -11}, "EngineCore_DP1 was ended by SIGSEGV"),
        ({"EngineCore": 1}, "EngineCore ended with exit code 1"),
        ({}, "further up in the log"),
        (None, "further up in the log"),  # an engine elsewhere
    ],
)
def test_the_cause_of_death_is_read_from_the_processes_that_ended(codes: dict[str, int] | None, says: str) -> None:
    manager = None if codes is None else SimpleNamespace(finished_procs=lambda: codes)
    assert says in cause_of_death(SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)))
