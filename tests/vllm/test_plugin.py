from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast

from darts_server.vllm.plugin import SHARE_CORES, share_cores


@pytest.fixture(autouse=True)
def spinning(monkeypatch: pytest.MonkeyPatch) -> object:
    """vLLM as it comes, whatever the test does to it."""
    before = shm_broadcast.__dict__["sched_yield"]
    monkeypatch.setitem(shm_broadcast.__dict__, "sched_yield", before)
    return before


def test_vllm_finds_it_in_each_of_its_processes() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="darts_server")
    assert found.load() is share_cores


@pytest.mark.parametrize("value", [None, "0"])
def test_it_does_nothing_unless_it_is_told_to(
    value: str | None, spinning: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARE_CORES, raising=False)
    if value is not None:
        monkeypatch.setenv(SHARE_CORES, value)
    share_cores()
    assert shm_broadcast.__dict__["sched_yield"] is spinning


def test_waiting_sleeps_when_cores_are_shared(spinning: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE_CORES, "1")
    share_cores()
    waiting = shm_broadcast.__dict__["sched_yield"]
    assert waiting is not spinning
    waiting()
