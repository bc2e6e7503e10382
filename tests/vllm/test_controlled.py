"""vLLM's control calls with several data-parallel engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from darts_server.exceptions import UpdateFailed
from darts_server.vllm.controlled import ControlledLLM
from darts_server.vllm.weights import VllmModel

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engines:
    """An LLM, and its client, of data-parallel engines with one worker each, which returns or raises its answer."""

    vllm_config: Any = SimpleNamespace(lora_config=None)
    collective_rpc: Any = ControlledLLM.collective_rpc

    def __init__(self, *answers: object) -> None:
        self.engine_core = self
        self.core_engines = [*range(len(answers))]
        self._answers = answers

    async def _call_utility_async(self, utility: str, method: str, *_: object, engine: int) -> list[object]:
        assert utility == "collective_rpc"
        answer = self._answers[engine]
        if isinstance(answer, Exception):
            raise answer
        return [answer]


def model_on(*answers: object) -> VllmModel:
    engines: Any = Engines(*answers)
    return VllmModel(engines)


@pytest.mark.parametrize("answer", ["OSError: no such file", RuntimeError("OSError: no such file")])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_load_that_fails_on_any_data_parallel_engine_has_failed(rank: int, answer: object) -> None:
    model = model_on(*(answer if engine == rank else None for engine in range(2)))
    with pytest.raises(UpdateFailed, match="no such file"):
        await model.load([])
    with pytest.raises(UpdateFailed, match="no such file"):
        await model.abandon_update()


async def test_a_load_that_succeeds_on_all_data_parallel_engines_has_succeeded() -> None:
    await model_on(None, None).load([])
