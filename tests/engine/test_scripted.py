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


async def test_candidates_that_are_stopped_aborted_or_fail_have_no_finish_reason_or_raise() -> None:
    scripts = [Script(9), Script(1, aborted=True), Script(1, error=CandidateFailed("boom")), Script(99)]
    engine = ScriptedEngine(lambda _, index: scripts[index])
    stopped, aborted, failing, endless = [await engine.start("p", index) for index in range(4)]
    await engine.step()
    stopped.stop()
    with pytest.raises(CandidateFailed, match="1 candidates still run"):
        await engine.run(steps=5)
    assert [(r.tokens, r.finish_reason) for r in (await stopped.result(), await aborted.result())] == [(1, None)] * 2
    with pytest.raises(CandidateFailed, match="boom"):
        await failing.result()
    engine.kill()
    with pytest.raises(EngineDead):
        await endless.result()
    with pytest.raises(EngineDead):
        await engine.start("p", 4)


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
