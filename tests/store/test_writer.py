"""The thread that writes."""

import logging
import sys
import threading

import pytest

from darts_server.store.writer import BackgroundWriter


def test_stop_ends_the_thread_in_any_state() -> None:
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the threads meet at every step
    try:
        for number in range(6_000):
            writer = BackgroundWriter(lambda: None, seconds=0)
            for _ in range(number % 400):
                writer.wake()
            writer.stop()
    finally:
        sys.setswitchinterval(switch)


def test_a_wake_leads_to_one_write() -> None:
    written = threading.Semaphore(0)
    writer = BackgroundWriter(written.release, seconds=0.01)
    for _ in range(3):
        writer.wake()
        assert written.acquire(timeout=10)
    assert not written.acquire(timeout=0.1)
    writer.stop()


def test_a_failure_is_kept_logged_once_and_retried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    tries = threading.Semaphore(0)
    repaired, succeeded = threading.Event(), threading.Event()

    def write() -> None:
        tries.release()
        if not repaired.is_set():
            raise OSError("no space")
        succeeded.set()

    with caplog.at_level(logging.WARNING):
        writer = BackgroundWriter(write, seconds=0.001)
        writer.wake()
        for _ in range(5):
            assert tries.acquire(timeout=10)
        assert writer.fault == "no space"
        repaired.set()
        assert succeeded.wait(timeout=10)
        writer.stop()
    assert writer.fault is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
