"""Groups whose requests come one after another, as from a pool of trajectories of limited size."""

import logging
import re

import pytest

from darts_server.engine.scripted import settle
from darts_server.rollout.joining import WINDOW
from darts_server.rollout.plan import Limits
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import NAMED_WAIT, SAMPLED, JoiningHarness

pytestmark = pytest.mark.anyio


def observed(harness: JoiningHarness) -> list[bool]:
    """Whether each group was full when it was sealed."""
    sealed: list[bool] = []
    harness.rollouts.observers.group_sealed.add(sealed.append)
    return sealed


@pytest.mark.parametrize("name", [None, "uid"])
async def test_a_named_group_is_not_sealed_by_silence(name: str | None) -> None:
    """Its trajectories may all be in their environments."""
    harness = JoiningHarness(lengths(9), SAMPLED)
    sealed = observed(harness)
    for number in range(4):
        harness.send(f"c{number}", name=name)
        await settle()
        await harness.advance_clock(0.9 * NAMED_WAIT)
    await harness.engine.run()
    assert len({caller.group_id for caller in harness.callers}) == (4 if name is None else 1)
    assert sealed == ([False] * 4 if name is None else [True])


async def test_a_named_group_does_not_wait_for_ever_whatever_others_send() -> None:
    """As where the pool is smaller than the group: the others come only after an answer."""
    harness = JoiningHarness(lengths(9), SAMPLED)
    sealed = observed(harness)
    harness.send("c0", name="uid")
    harness.send("c1", name="uid")
    await settle()
    for others in range(6):
        assert sealed == [False] * others
        harness.send(f"other {others}", prompt=f"p{others}")
        await settle()
        await harness.advance_clock(NAMED_WAIT / 6)
    assert sealed == [False] * 7
    assert harness.callers[0].group_id == harness.callers[1].group_id
    await harness.engine.run()
    assert all(caller.is_answered for caller in harness.callers)
    await harness.assert_empty()


async def test_a_named_group_waits_at_least_as_long_as_another() -> None:
    harness = JoiningHarness(lengths(9), SAMPLED, wait=2 * NAMED_WAIT)
    sealed = observed(harness)
    harness.send("c0", name="uid")
    await settle()
    await harness.advance_clock(1.9 * NAMED_WAIT)
    assert sealed == []
    await harness.advance_clock(0.1 * NAMED_WAIT)
    assert sealed == [False]
    await harness.engine.run()
    await harness.assert_empty()


async def test_groups_that_are_often_short_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    report = JoiningHarness(lengths(9), SAMPLED).rollouts.joiner.report_sealed
    with caplog.at_level(logging.WARNING):
        for number in range(3 * WINDOW):
            report(full=number % 3 > 0, planned=8)
        assert len(caplog.records) == 1
        assert "sealed with fewer than 8" in caplog.text
        for _ in range(WINDOW):
            report(full=True, planned=8)
        for _ in range(WINDOW):
            report(full=False, planned=8)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("session", "name"),
    [("uid_3", "uid"), ("a_b_12", "a_b"), ("uid", None), ("uid_x", None), ("_1", None), (None, None)],
)
def test_a_session_names_its_group_if_it_matches_the_pattern(session: str | None, name: str | None) -> None:
    assert Limits(8, group_pattern=re.compile("(.+)_[0-9]+")).group_name(session) == name
    assert Limits(8).group_name(session) is None
