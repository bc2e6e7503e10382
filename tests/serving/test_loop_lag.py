"""Measurement of how late the event loop is."""

import asyncio
import logging
import threading
import time

import pytest

from darts_server.serving.loop_lag import watch_loop

pytestmark = pytest.mark.anyio


def hold_the_loop(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_a_blocked_loop_is_measured_and_the_call_that_blocks_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lags: list[float] = []
    began = time.monotonic()
    # Less than the first stall, and more than the machine may hold the loop for.
    with caplog.at_level(logging.WARNING), watch_loop(lags.append, interval=0.01, late=0.8):
        await asyncio.sleep(0.05)
        assert lags
        hold_the_loop(1.0)
        await asyncio.sleep(0.05)
        hold_the_loop(0.5)
        await asyncio.sleep(0.05)
    assert sum(lag > 0.9 for lag in lags) >= 1
    assert sum(lag > 0.4 for lag in lags) >= 2
    assert sum(lags) <= time.monotonic() - began, "each stall counts once"
    # Another line is logged after `LOG_SECONDS` at the earliest.
    [record] = caplog.records
    assert "hold_the_loop (" in record.getMessage()
    assert record.levelno == logging.WARNING
    assert vars(record)["seconds"] >= 0.8


async def test_no_line_is_logged_while_the_loop_is_on_time_and_no_thread_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lags: list[float] = []
    with caplog.at_level(logging.WARNING), watch_loop(lags.append, interval=0.01, late=60.0):
        await asyncio.sleep(0.1)
    count = len(lags)
    assert count > 0
    assert all(lag >= 0 for lag in lags)
    await asyncio.sleep(0.05)
    assert len(lags) == count
    assert not caplog.records
    assert "darts-loop-lag" not in {thread.name for thread in threading.enumerate()}
