"""A resume of the engine holds, whatever pause was under way."""

import asyncio
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.vllm.controlled import EnginePause

pytestmark = pytest.mark.anyio


class Engine:
    """Pauses when it gets idle, as vLLM's engine does, resumed or not."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.is_paused = False
        self.error: Exception | None = None

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", True)
        await self.idle.wait()
        self.is_paused = True
        if self.error is not None:
            raise self.error

    async def resume_generation(self) -> None:
        self.is_paused = False


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(AsyncLLM, "pause_generation", Engine.pause_generation)
    monkeypatch.setattr(AsyncLLM, "resume_generation", Engine.resume_generation)
    return Engine()


@pytest.fixture
def pause(engine: Any) -> EnginePause:
    return EnginePause(engine)


async def test_a_pause_stays_until_the_engine_is_resumed(engine: Engine, pause: EnginePause) -> None:
    engine.idle.set()
    await pause.pause("wait")
    assert engine.is_paused
    await pause.resume()
    assert not engine.is_paused


async def test_a_pause_that_takes_effect_after_a_resume_is_undone(engine: Engine, pause: EnginePause) -> None:
    paused = asyncio.create_task(pause.pause("wait"))
    await asyncio.sleep(0)
    await pause.resume()
    engine.idle.set()
    await paused
    assert not engine.is_paused


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
async def test_also_if_its_caller_has_given_up(engine: Engine, pause: EnginePause, error: Exception | None) -> None:
    engine.error = error
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pause.pause("wait"), 0.01)
    await pause.resume()
    engine.idle.set()
    await asyncio.sleep(0.01)
    assert not engine.is_paused


async def test_a_later_pause_is_not_undone(engine: Engine, pause: EnginePause) -> None:
    first = asyncio.create_task(pause.pause("wait"))
    await asyncio.sleep(0)
    await pause.resume()
    second = asyncio.create_task(pause.pause("wait"))
    await asyncio.sleep(0)
    engine.idle.set()
    await asyncio.gather(first, second)
    assert engine.is_paused
