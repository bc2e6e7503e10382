"""The thread that writes."""

import logging
import sys
import threading

import pytest

from darts_server.store.writer import Writer


def test_a_stop_is_heard_whatever_the_thread_is_doing() -> None:
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the threads meet at every step
    try:
        for number in range(6_000):
            writer = Writer(lambda: None, seconds=0)
            for _ in range(number % 400):
                writer.wake()
            writer.stop()
    finally:
        sys.setswitchinterval(switch)


def test_what_is_woken_for_is_written_once_and_then_all_is_quiet() -> None:
    written = threading.Semaphore(0)
    writer = Writer(written.release, seconds=0.01)
    for _ in range(3):
        writer.wake()
        assert written.acquire(timeout=10)
    assert not written.acquire(timeout=0.1)
    writer.stop()


def test_a_failure_is_kept_logged_once_and_tried_again_until_it_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    tries = threading.Semaphore(0)
    mended, succeeded = threading.Event(), threading.Event()

    def write() -> None:
        tries.release()
        if not mended.is_set():
            raise OSError("no space")
        succeeded.set()

    with caplog.at_level(logging.WARNING):
        writer = Writer(write, seconds=0.001)
        writer.wake()
        for _ in range(5):
            assert tries.acquire(timeout=10)
        assert writer.fault == "no space"
        mended.set()
        assert succeeded.wait(timeout=10)
        writer.stop()
    assert writer.fault is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
