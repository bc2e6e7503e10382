"""Single requests that are aborted by their names, alone on the engine or joined to groups."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import Conflict, NotFound
from darts_server.rollout.aborting import TrajectoryAborter
from darts_server.rollout.observers.provenance import Provenance
from darts_server.serving.admission import Caller, caller
from darts_server.types import DiscardReason, Sample
from tests.rollout.batches.test_submission import Texts
from tests.rollout.helpers import Harness, lengths
from tests.rollout.joining.joining import POLICIES, JoiningHarness, SignedOutput, SigningCandidate, SteppedLoop

pytestmark = pytest.mark.anyio
ABORTED = DiscardReason.ABORTED


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@pytest.fixture(autouse=True)
def _no_caller() -> Iterator[None]:
    token = caller.set(Caller())
    yield
    caller.reset(token)


class Signed:
    """Renders outputs that are signed."""

    async def to_sample(self, output: SignedOutput) -> Sample:
        return Sample(range(output.tokens), None, "", None)


@dataclass
class Alone:
    """A request that runs alone on an engine. ``ended``: it does not run any more."""

    generated: int = 0
    ended: bool = False

    def tokens(self) -> int | None:
        return None if self.ended else self.generated

    async def abort(self) -> Sample | None:
        if self.ended:
            return None
        self.ended = True
        return Sample(list(range(self.generated)), None, "text", None)


async def test_a_request_that_runs_alone_is_aborted_by_its_callers_name_or_its_own() -> None:
    harness = Harness(lengths(9))
    aborter = TrajectoryAborter(harness.rollouts, Texts(), Provenance())
    singles = harness.rollouts.singles
    token = caller.set(Caller("me", request_id="my/request:1"))
    try:
        for name in ("my/request:1", "cmpl-my/request:1-0"):
            alone = Alone(3)
            with singles.track("cmpl-my/request:1-0", alone):
                harness.engine.weight_version = 0
                singles.weights_change()
                harness.engine.weight_version, alone.generated = 1, 5
                aborted = await aborter.abort(name)
                assert (aborted.trajectory_id, aborted.sample.text) == ("cmpl-my/request:1-0", "text")
                assert (len(aborted.sample.token_ids), aborted.record.reason) == (5, ABORTED)
                assert aborted.record.version_spans == ((0, 3), (1, 2))
                assert (aborted.record.weight_version_start, aborted.record.weight_version_end) == (0, 1)
                singles.weights_change()
                with pytest.raises(Conflict, match="has ended"):
                    await aborter.abort(name)
            with pytest.raises(NotFound):
                await aborter.abort(name)
    finally:
        caller.reset(token)


async def test_requests_of_others_are_not_found_and_names_that_are_used_twice_are_ambiguous() -> None:
    harness = Harness(lengths(9))
    aborter = TrajectoryAborter(harness.rollouts, Texts(), Provenance())
    singles = harness.rollouts.singles
    token = caller.set(Caller("other", request_id="r"))
    with singles.track("cmpl-r-0", Alone(1)), singles.track("cmpl-r-1", Alone(2)):
        with pytest.raises(Conflict, match="2 running requests"):
            await aborter.abort("r")
        assert len((await aborter.abort("cmpl-r-1")).sample.token_ids) == 2
        caller.reset(token)
        with pytest.raises(NotFound):
            await aborter.abort("cmpl-r-0")


async def test_a_joined_request_that_is_aborted_by_its_name_is_answered_and_its_group_goes_on() -> None:
    harness = JoiningHarness(lambda *_: Script(9), POLICIES["shortest"])
    aborter = TrajectoryAborter(harness.rollouts, Signed(), Provenance())  # type: ignore[arg-type]
    callers = await harness.send_all(4)
    await harness.steps(3)
    aborted = await aborter.abort("c1")
    assert aborted.trajectory_id == "group-c0:1"
    assert (len(aborted.sample.token_ids), aborted.record.reason) == (3, ABORTED)
    await settle()
    assert (callers[1].result.request, callers[1].result.tokens) == ("p:c1", 3)
    with pytest.raises(NotFound):
        await aborter.abort("c1")
    await harness.steps(9)
    assert sorted(c.result.tokens for c in callers) == [3, 9, 9, 9]
    await harness.assert_empty()


async def test_joined_requests_of_others_are_not_found() -> None:
    harness = JoiningHarness(lambda *_: Script(9), POLICIES["shortest"])
    aborter = TrajectoryAborter(harness.rollouts, Signed(), Provenance())  # type: ignore[arg-type]
    token = caller.set(Caller("other"))
    callers = await harness.send_all(4)
    await harness.steps(3)
    caller.reset(token)
    with pytest.raises(NotFound):
        await aborter.abort("c1")
    await harness.steps(9)
    assert [c.result.tokens for c in callers] == [9] * 4
    await harness.assert_empty()


async def test_a_joined_request_whose_candidate_has_ended_waits_on() -> None:
    harness = JoiningHarness(lambda *which: Script(2 if which == ("p:c0", 0) else 9), POLICIES["shortest"])
    aborter = TrajectoryAborter(harness.rollouts, Signed(), Provenance())  # type: ignore[arg-type]
    callers = await harness.send_all(2)  # of four: nothing is decided yet
    await harness.steps(3)
    with pytest.raises(Conflict, match="waits for the others"):
        await aborter.abort("c0")
    await harness.advance_clock()
    await harness.steps(9)
    assert sorted(c.result.tokens for c in callers) == [2, 9]
    await harness.assert_empty()


async def test_a_joined_request_whose_candidate_finishes_as_it_is_aborted_is_answered_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = JoiningHarness(lambda *_: Script(4), POLICIES["shortest"])
    aborter = TrajectoryAborter(harness.rollouts, Signed(), Provenance())  # type: ignore[arg-type]
    callers = await harness.send_all(4)
    await harness.steps(3)
    # Its last token is under way when the engine gets the abort.
    monkeypatch.setattr(SigningCandidate, "stop", lambda self: self.tokens() or 0)
    aborting = asyncio.create_task(aborter.abort("c1"))
    await settle()
    await harness.steps(1)
    with pytest.raises(Conflict, match="has finished"):
        await aborting
    await settle()
    assert [c.result.tokens for c in callers] == [4, 4, 4, 4]
    await harness.assert_empty()
