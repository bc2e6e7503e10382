"""vLLM's control calls: loads on several data-parallel engines, and late pauses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import UpdateFailed
from darts_server.vllm.api.controlled import ControlledLLM
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.api.weights import VllmModel

pytestmark = pytest.mark.anyio


class Engines:
    """An LLM with data-parallel engines, and their client. The worker of each engine returns or raises its answer."""

    vllm_config: Any = SimpleNamespace(lora_config=None)
    collective_rpc: Any = ControlledLLM.collective_rpc
    reset_prefix_cache: Any = ControlledLLM.reset_prefix_cache
    _call_engines: Any = ControlledLLM._call_engines

    def __init__(self, *answers: object) -> None:
        self.engine_core = self
        self.core_engines = list(range(len(answers)))
        self._answers = answers

    async def _call_utility_async(self, utility: str, *_: object, engine: int) -> object:
        answer = self._answers[engine]
        if isinstance(answer, Exception):
            raise answer
        return [answer] if utility == "collective_rpc" else answer


@pytest.mark.parametrize("answer", ["OSError: no such file", RuntimeError("OSError: no such file")])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_load_fails_if_it_fails_on_any_data_parallel_engine(rank: int, answer: object) -> None:
    engines: Any = Engines(*(answer if engine == rank else None for engine in range(2)))
    for call in (VllmModel(engines).load([]), VllmModel(engines).abandon_update()):
        with pytest.raises(UpdateFailed, match="no such file"):
            await call


@pytest.mark.parametrize("answers", [(True, True), (True, False), (False, True)])
async def test_a_cache_is_cleared_if_all_data_parallel_engines_have_cleared_it(answers: tuple[bool, bool]) -> None:
    """vLLM answers for the first engine alone."""
    engines: Any = Engines(*answers)
    assert await engines.reset_prefix_cache() == all(answers)


class Caches:
    """An LLM that counts what is cleared."""

    vllm_config: Any = SimpleNamespace(lora_config=None)

    def __init__(self, is_idle: bool, is_multimodal: bool) -> None:
        self.is_idle = is_idle
        self.model_config = SimpleNamespace(is_multimodal_model=is_multimodal)
        self.held_requests = self
        self.calls: list[str] = []

    def change_cache_salt(self) -> None:
        self.calls.append("salt")

    async def reset_prefix_cache(self) -> bool:
        return self.is_idle

    async def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")


@pytest.mark.parametrize(
    ("is_idle", "is_multimodal", "calls"),
    [(True, True, ["salt", "encoder"]), (True, False, ["salt"]), (False, True, ["salt"])],
)
async def test_nothing_of_the_old_weights_is_used_by_later_requests(
    is_idle: bool, is_multimodal: bool, calls: list[str]
) -> None:
    caches: Any = Caches(is_idle, is_multimodal)
    await VllmModel(caches).clear_caches()
    assert caches.calls == calls


# --- A resume holds, even if a pause was pending


class Engine(ControlledLLM):
    """Pauses when it is next idle, like vLLM's engine, even after a resume."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.is_halted = False
        self.error: Exception | None = None
        self._pause_tasks = set()

    async def wait_for_received_outputs(self) -> None:
        assert self.is_halted

    def shutdown(self, timeout: float | None = None) -> None:
        """Called by AsyncLLM's finalizer. Nothing runs here."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    async def pause(engine: Engine, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", True)
        await engine.idle.wait()
        engine.is_halted = True
        if engine.error is not None:
            raise engine.error

    async def resume(engine: Engine) -> None:
        engine.is_halted = False

    monkeypatch.setattr(AsyncLLM, "pause_generation", pause)
    monkeypatch.setattr(AsyncLLM, "resume_generation", resume)
    return Engine()


@pytest.mark.parametrize("again", [False, True])
async def test_a_pause_that_takes_effect_after_a_resume_is_undone_unless_another_pause_follows(
    engine: Engine, again: bool
) -> None:
    pauses = [asyncio.create_task(engine.pause_engine("wait"))]
    await asyncio.sleep(0)
    await engine.resume_engine()
    if again:
        pauses.append(asyncio.create_task(engine.pause_engine("wait")))
        await asyncio.sleep(0)
    engine.idle.set()
    await asyncio.gather(*pauses)
    assert engine.is_halted is again


@pytest.mark.parametrize("error", [None, RuntimeError("no")])
async def test_a_late_pause_is_undone_even_if_its_caller_has_given_up(engine: Engine, error: Exception | None) -> None:
    engine.error = error
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause_engine("wait"), 0.01)
    await engine.resume_engine()
    engine.idle.set()
    await asyncio.sleep(0.01)
    assert not engine.is_halted


async def test_a_pause_waits_until_earlier_outputs_are_processed() -> None:
    """Otherwise tokens of the old weights would count as tokens of the new weights."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    core = SimpleNamespace(outputs_queue=queue, get_output_async=queue.get)
    llm: Any = SimpleNamespace(engine_core=core, is_processing_outputs=False)
    ShapingLLM.replace_output_reader(llm)
    handled = []

    async def handle() -> None:
        while True:
            output = await core.get_output_async()
            # vLLM yields between two chunks of an output.
            await asyncio.sleep(0)
            handled.append(output)

    llm.output_handler = asyncio.create_task(handle())
    for number in range(5):
        queue.put_nowait(number)
    await ControlledLLM.wait_for_received_outputs(llm)
    assert handled == list(range(5))
    llm.output_handler.cancel()

    # No task processes this output any more.
    queue.put_nowait(5)
    async with asyncio.timeout(60):
        await ControlledLLM.wait_for_received_outputs(llm)
