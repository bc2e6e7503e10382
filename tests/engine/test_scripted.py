import asyncio

import pytest

from darts_server.engine.port import HiddenState, Probe
from darts_server.engine.scripted import Script, ScriptedEngine
from darts_server.exceptions import CandidateFailed, EngineDead
from darts_server.types import FinishReason

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_candidate_makes_a_token_a_step_after_its_delay() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=3, delay=2))
    running = await engine.start("p", 0)
    seen = []
    for _ in range(5):
        seen.append(running.tokens())
        await engine.step()
    assert seen == [0, 0, 0, 1, 2]
    result = await running.result()
    assert (result.tokens, result.finish_reason, result.output) == (3, FinishReason.STOP, [0, 1, 2])
    assert running.tokens() is None
    assert engine.truncate("p", result.output, 2) == [0, 1]


async def test_a_stopped_candidate_ends_without_a_reason_and_with_what_it_had() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=9))
    running = await engine.start("p", 0)
    await engine.step()
    running.stop()
    running.stop()
    result = await running.result()
    assert (result.tokens, result.finish_reason) == (1, None)


async def test_scripts_fail_and_get_lost() -> None:
    scripts = [Script(1, error=CandidateFailed("boom")), Script(1, aborted=True)]
    engine = ScriptedEngine(lambda _, index: scripts[index])
    failing, lost = await engine.start("p", 0), await engine.start("p", 1)
    await engine.run()
    with pytest.raises(CandidateFailed, match="boom"):
        await failing.result()
    assert (await lost.result()).finish_reason is None


async def test_a_killed_engine_fails_what_runs_and_starts_nothing() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=9))
    waiting = asyncio.create_task((await engine.start("p", 0)).result())
    engine.kill()
    with pytest.raises(EngineDead):
        await waiting
    with pytest.raises(EngineDead):
        await engine.start("p", 1)


async def test_a_script_without_end_is_noticed() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=99))
    await engine.start("p", 0)
    with pytest.raises(CandidateFailed, match="1 candidates still run"):
        await engine.run(steps=5)


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_probe_is_told_each_state_once_as_it_comes_even_after_the_end(lag: int) -> None:
    told: list[tuple[int, int, list[float]]] = []

    def tell(probed: HiddenState) -> None:
        told.append((engine.now, probed.tokens, probed.vector.tolist()))

    engine = ScriptedEngine(lambda *_: Script(length=4, hidden=lambda tokens: (tokens, 0.5), lag=lag))
    await engine.start("p", 0, Probe((2, 4, 9), tell))
    await engine.start("p", 1)
    for _ in range(8):
        await engine.step()
    assert told == [(2 + lag, 2, [2.0, 0.5]), (4 + lag, 4, [4.0, 0.5])]
