import threading
import time
from importlib.metadata import entry_points

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast

from darts_server.vllm.plugin import SHARE_CORES, prepare_process, share_cores


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> object:
    """vLLM's own wait functions, restored after the test."""
    before = shm_broadcast.__dict__["sched_yield"]
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait)
    monkeypatch.setitem(shm_broadcast.__dict__, "sched_yield", before)
    return before


def test_the_plugin_is_registered_as_an_entry_point_of_vllm() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="darts_server")
    assert found.load() is prepare_process


@pytest.mark.parametrize("value", [None, "0"])
def test_vllm_is_unchanged_unless_the_variable_is_set_to_1(
    value: str | None, original: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE_CORES, raising=False)
    if value is not None:
        monkeypatch.setenv(SHARE_CORES, value)
    share_cores()
    assert shm_broadcast.__dict__["sched_yield"] is original


def test_waiting_processes_sleep_when_cores_are_shared(original: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_CORES, "1")
    share_cores()
    waiting = shm_broadcast.__dict__["sched_yield"]
    assert waiting is not original
    waiting()


def test_a_reader_sleeps_until_it_is_notified_from_the_first_message_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_CORES, "1")
    share_cores()
    share_cores()  # in the server, and again in the engine if that is forked
    with zmq.Context() as context:
        address = "inproc://notifications"
        writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
        try:
            reader.last_read = time.monotonic()
            began, spent = time.monotonic(), time.process_time()
            for _ in range(20):
                reader.wait()  # nothing comes: it looks for a message anyway
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
