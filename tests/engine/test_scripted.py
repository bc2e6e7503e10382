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


async def test_a_candidate_generates_one_token_per_step_after_its_delay() -> None:
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


async def test_a_stopped_candidate_has_no_finish_reason_and_the_tokens_generated_before() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=9))
    running = await engine.start("p", 0)
    await engine.step()
    running.stop()
    result = await running.result()
    assert (result.tokens, result.finish_reason) == (1, None)


async def test_scripted_candidates_fail_and_are_aborted() -> None:
    scripts = [Script(1, error=CandidateFailed("boom")), Script(1, aborted=True)]
    engine = ScriptedEngine(lambda _, index: scripts[index])
    failing, aborted = await engine.start("p", 0), await engine.start("p", 1)
    await engine.run()
    with pytest.raises(CandidateFailed, match="boom"):
        await failing.result()
    assert (await aborted.result()).finish_reason is None


async def test_a_killed_engine_fails_running_candidates_and_starts_no_more() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=9))
    waiting = asyncio.create_task((await engine.start("p", 0)).result())
    engine.kill()
    with pytest.raises(EngineDead):
        await waiting
    with pytest.raises(EngineDead):
        await engine.start("p", 1)


async def test_run_raises_if_candidates_still_run_after_the_given_steps() -> None:
    engine = ScriptedEngine(lambda *_: Script(length=99))
    await engine.start("p", 0)
    with pytest.raises(CandidateFailed, match="1 candidates still run"):
        await engine.run(steps=5)


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_probe_receives_each_state_once_after_its_lag_even_after_the_candidate_has_finished(lag: int) -> None:
    received: list[tuple[int, int, list[float]]] = []

    def on_state(state: HiddenState) -> None:
        received.append((engine.now, state.tokens, state.vector.tolist()))

    engine = ScriptedEngine(lambda *_: Script(length=4, hidden=lambda tokens: (tokens, 0.5), lag=lag))
    await engine.start("p", 0, Probe((2, 4, 9), on_state))
    await engine.start("p", 1)
    for _ in range(8):
        await engine.step()
    assert received == [(2 + lag, 2, [2.0, 0.5]), (4 + lag, 4, [4.0, 0.5])]
