"""Groups whose requests come one after another, as from a pool of trajectories of limited size."""

import logging
import re

import pytest

from darts_server.engine.scripted import settle
from darts_server.observers import GroupObserver
from darts_server.rollout.joining import NAMED_TIMEOUTS
from darts_server.rollout.plan import Limits
from darts_server.rollout.short_groups import WINDOW, ShortGroups
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import SAMPLED, WAIT, JoiningHarness, SteppedLoop

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


class Sealed(GroupObserver):
    def __init__(self) -> None:
        self.full: list[bool] = []

    def group_sealed(self, *, full: bool) -> None:
        self.full.append(full)


def observed(harness: JoiningHarness) -> Sealed:
    sealed = Sealed()
    harness.rollouts.observe(sealed)
    return sealed


@pytest.mark.parametrize("name", [None, "uid"])
async def test_a_named_group_waits_while_others_send_requests(name: str | None) -> None:
    harness = JoiningHarness(lengths(9), SAMPLED)
    sealed = observed(harness)
    for number in range(4):
        harness.send(f"c{number}", name=name)
        for _ in range(3):
            harness.rollouts.joiner.note_activity()
            await harness.advance_clock(0.8 * WAIT)
    await harness.engine.run()
    assert len({caller.group_id for caller in harness.callers}) == (4 if name is None else 1)
    assert sealed.full == ([False] * 4 if name is None else [True])


async def test_a_named_group_is_sealed_when_nobody_sends_anything_and_does_not_wait_for_ever() -> None:
    """The first holds where the pool is smaller than the group: its others come only after an answer."""
    harness = JoiningHarness(lengths(9), SAMPLED)
    sealed = observed(harness)
    harness.send("c0", name="uid")
    await settle()
    await harness.advance_clock()
    assert sealed.full == [False]
    harness.send("c1", name="other")
    await settle()
    for step in range(2 * NAMED_TIMEOUTS):
        assert len(sealed.full) == 1, step
        harness.rollouts.joiner.note_activity()
        await harness.advance_clock(WAIT / 2)
    assert sealed.full == [False, False]
    await harness.engine.run()
    await harness.assert_empty()


def test_groups_that_are_often_short_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    short = ShortGroups()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * WINDOW):
            short.add(full=number % 3 > 0, planned=8)
        assert len(caplog.records) == 1
        assert "sealed with fewer than 8" in caplog.text
        for _ in range(WINDOW):
            short.add(full=True, planned=8)
        for _ in range(WINDOW):
            short.add(full=False, planned=8)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("session", "name"),
    [("uid_3", "uid"), ("a_b_12", "a_b"), ("uid", None), ("uid_x", None), ("_1", None), (None, None)],
)
def test_a_session_names_its_group_if_it_matches_the_pattern(session: str | None, name: str | None) -> None:
    assert Limits(8, group_pattern=re.compile("(.+)_[0-9]+")).group_name(session) == name
    assert Limits(8).group_name(session) is None
