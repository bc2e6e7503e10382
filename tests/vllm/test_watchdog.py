"""The watchdog, with an engine that the test plays."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.shutdown import cause_of_death, wait_until_hung

pytestmark = pytest.mark.anyio
LIMIT = 0.05


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_an_engine_that_works_and_says_nothing_is_hung() -> None:
    silent: Any = SimpleNamespace(should_respond=True)
    async with asyncio.timeout(30):
        await wait_until_hung(silent, LIMIT)


async def test_one_that_speaks_or_has_nothing_to_do_is_not() -> None:
    """Until the moment when it neither speaks nor rests."""

    class Engine:
        looks = 0
        has_sent = False

        @property
        def should_respond(self) -> bool:
            self.looks += 1
            self.has_sent = self.looks <= 40
            return self.looks > 20

    engine: Any = Engine()
    async with asyncio.timeout(30):
        await wait_until_hung(engine, LIMIT)
    assert engine.looks >= 50


async def test_its_outputs_are_heard_and_so_is_its_death() -> None:
    said: list[Any] = ["tokens", EngineDeadError()]

    async def get_output() -> Any:
        if isinstance(output := said.pop(0), Exception):
            raise output
        return output

    deaths: list[int] = []
    engine_core = SimpleNamespace(get_output_async=get_output)
    llm: Any = SimpleNamespace(engine_core=engine_core, has_sent=False, on_death=lambda: deaths.append(1))
    ShapingLLM.observe_outputs(llm)
    assert await engine_core.get_output_async() == "tokens"
    assert llm.has_sent
    assert not deaths
    with pytest.raises(EngineDeadError):
        await engine_core.get_output_async()
    assert deaths == [1]


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ({"EngineCore": -9}, "EngineCore was killed (SIGKILL), most often because the machine has no memory left"),
        ({"EngineCore_DP0": 0, "EngineCore_DP1": -11}, "EngineCore_DP1 was ended by SIGSEGV"),
        ({"EngineCore": 1}, "EngineCore ended with exit code 1"),
        ({}, "further up in the log"),
    ],
)
def test_the_cause_of_death_is_read_from_the_processes_that_ended(codes: dict[str, int], says: str) -> None:
    manager = SimpleNamespace(finished_procs=lambda: codes)
    assert says in cause_of_death(SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)))


def test_an_engine_elsewhere_has_no_processes_here() -> None:
    assert "log" in cause_of_death(SimpleNamespace(resources=SimpleNamespace(engine_manager=None)))
