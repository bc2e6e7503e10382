from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from darts_server.vllm.plugin import SHARE_CORES, prepare_process, share_cores


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> object:
    """vLLM's own wait function, restored after the test."""
    before = shm_broadcast.__dict__["sched_yield"]
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
