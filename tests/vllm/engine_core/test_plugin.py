import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast

from darts_server.vllm.engine_core.plugin import SERVER_PID, SHARE_CORES, end_with_server, share_cores
from tests.deploy.names import ROOT


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> object:
    """vLLM's own wait functions, restored after the test."""
    before = shm_broadcast.__dict__["sched_yield"]
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait)
    monkeypatch.setitem(shm_broadcast.__dict__, "sched_yield", before)
    return before


def test_waiting_processes_sleep_if_the_variable_says_that_cores_are_shared(
    original: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv(SHARE_CORES, value)
        share_cores()
        assert (shm_broadcast.__dict__["sched_yield"] is original) is (value == "0")


def test_a_reader_sleeps_until_it_is_notified_from_the_first_message_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_CORES, "1")
    # Twice: in the server, and again in an engine that is forked from it.
    share_cores()
    share_cores()
    with zmq.Context() as context:
        address = "inproc://notifications"
        writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
        try:
            reader.last_read = time.monotonic()
            began = time.monotonic()
            spent = time.process_time()
            for _ in range(20):
                # There is no notification, but the reader looks for a message anyway.
                reader.wait()
            assert time.monotonic() - began > 0.15
            assert time.process_time() - spent < 0.1
            reader.last_read -= 10.0
            notify = threading.Timer(0.2, writer.notify)
            began = time.monotonic()
            notify.start()
            reader.wait()
            assert time.monotonic() - began > 0.1
            notify.join()
        finally:
            for each in (writer, reader):
                for name in ("local_notify_socket", "read_cancel_socket", "write_cancel_socket"):
                    if (opened := getattr(each, name)) is not None:
                        opened.close(0)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_all_processes_of_an_engine_end_when_the_server_is_killed(method: str) -> None:
    command = [sys.executable, "-m", "tests.vllm.engine_processes", method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            processes = [psutil.Process(int(server.stdout.readline())) for _ in range(1 + 2 + 4)]
            assert all(process.is_running() for process in processes)
        finally:
            server.kill()
        assert psutil.wait_procs(processes[1:], timeout=60)[1] == []


def test_nothing_is_watched_outside_of_a_servers_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    before = threading.active_count()
    monkeypatch.setenv(SERVER_PID, "1")
    end_with_server()
    monkeypatch.undo()
    monkeypatch.setenv(SERVER_PID, str(os.getpid()))
    end_with_server()
    # There may be fewer: a thread of an earlier test may have ended meanwhile.
    assert threading.active_count() <= before
