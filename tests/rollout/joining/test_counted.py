"""Groups that are only counted: what is recorded of single requests that the engine serves by itself."""

import asyncio

import pytest

from darts_server.records import GroupRecord
from darts_server.rollout.counted import MOST_MEMBERS, CountedGroups, Member
from darts_server.rollout.plan import UNSHAPED, Plan
from darts_server.rollout.spec import JoinRequest
from darts_server.serving.admission import Admission
from darts_server.serving.fair_cache import FairCache
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Recorder
from tests.rollout.joining.joining import NAMED_WAIT, WAIT, SteppedLoop

pytestmark = pytest.mark.anyio
PLAN = Plan("off", UNSHAPED, 3, single=True)


class Harness:
    """Counted groups, with requests that generate what a test says."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.closed: list[tuple[bool, int]] = []
        self.version = 1
        self.generated: dict[str, int] = {}
        self.groups = CountedGroups(
            self.recorder.events,
            lambda *, is_full, planned_size: self.closed.append((is_full, planned_size)),
            lambda: self.version,
            WAIT,
            NAMED_WAIT,
            asyncio.get_running_loop().time,
        )

    def join(self, request: str, prompt: str = "p", name: str | None = None, *, start: bool = True) -> Member:
        ticket = Admission(lambda: 0, None).admit(1)
        joining = JoinRequest(request, request, PLAN, prompt, f"{name}/{prompt}", ticket, name)
        member = self.groups.join(joining, lambda: self.generated.get(request, 0))
        if start:
            member.start()
        return member

    @property
    def record(self) -> GroupRecord:
        [record] = self.recorder.records
        return record


def finish(member: Member, tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
    member.finish([1, 2], list(range(tokens)), reason)


async def advance(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_full_group_is_recorded_when_its_last_request_has_finished() -> None:
    harness = Harness()
    first, second = harness.join("r0", name="g"), harness.join("r1", name="g")
    finish(first, 4)
    third, other = harness.join("r2", name="g"), harness.join("r3", name="g")
    finish(third, 9, FinishReason.LENGTH)
    assert harness.recorder.records == []
    finish(second, 2)
    record = harness.record
    assert (record.group_id, record.outcome, record.size, record.policy) == ("group-r0", Outcome.COMPLETED, 3, "off")
    assert record.request_ids == ("g", "r0", "r1", "r2")
    assert [c.tokens for c in record.candidates] == [4, 2, 9]
    assert [c.selected_as for c in record.candidates] == [SelectedAs.SHORT, SelectedAs.SHORT, SelectedAs.SHORT]
    assert {c.weight for c in record.candidates} == {1.0}
    assert [(each.index, len(each.token_ids)) for each in harness.recorder.returned] == [(0, 4), (2, 9), (1, 2)]
    assert {each.started_at for each in harness.recorder.returned} == {record.started_at}
    assert other.group.group_id == "group-r3", "a group takes no more requests than its size"
    assert harness.recorder.started == 4


@pytest.mark.parametrize(("name", "wait"), [(None, WAIT), ("g", NAMED_WAIT)])
async def test_a_group_with_missing_requests_ends_after_the_timeout(name: str | None, wait: float) -> None:
    harness = Harness()
    finish(harness.join("r0", name=name), 4)
    await advance(wait - 1)
    running = harness.join("r1", name=name)
    await advance(wait - 1)
    assert harness.recorder.records == []
    await advance(2)
    finish(running, 5)
    assert (harness.record.outcome, harness.record.size) == (Outcome.COMPLETED, 2)
    assert harness.closed == [(False, 3)]
    assert harness.groups._groups == {}


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (DiscardReason.ABORTED, Outcome.CANCELLED),
        (DiscardReason.CANCELLED, Outcome.CANCELLED),
        (DiscardReason.FAILED, Outcome.FAILED),
    ],
)
async def test_a_request_without_a_trajectory_leaves_its_seat_to_another_request(
    reason: DiscardReason, outcome: Outcome
) -> None:
    harness = Harness()
    for replaced in (True, False):
        harness.recorder.records.clear()
        members = [harness.join(f"r{i}") for i in range(3)]
        harness.generated["r1"] = 7
        members[1].leave(reason)
        members[1].leave(DiscardReason.CANCELLED)  # as its generator is closed
        finish(members[0], 4)
        if replaced:
            finish(harness.join("again"), 6)
        finish(members[2], 5)
        await advance(WAIT)
        record = harness.record
        assert record.outcome is (Outcome.COMPLETED if replaced else outcome)
        assert (record.candidates[1].tokens, record.candidates[1].reason) == (7, reason)
        assert len(record.selected) == 2 + replaced


async def test_each_token_has_the_version_of_the_weights_that_sampled_it() -> None:
    harness = Harness()
    members = [harness.join(f"r{i}") for i in range(3)]
    finish(members[0], 4)
    harness.generated["r1"] = 3
    harness.groups.record_weight_version()
    harness.version = 2
    finish(members[1], 5)
    finish(members[2], 5)
    record = harness.record
    assert [c.version_spans for c in record.candidates] == [((1, 4),), ((1, 3), (2, 2)), ((2, 5),)]
    assert record.mixed_versions


async def test_a_request_that_waits_for_new_weights_has_the_new_version() -> None:
    harness = Harness()
    members = [harness.join(f"r{i}", start=False) for i in range(3)]
    harness.groups.record_weight_version()
    harness.version = 2
    members.pop().leave(DiscardReason.CANCELLED)
    for member in members:
        member.start()
        finish(member, 4)
    await advance(WAIT)
    first = harness.recorder.records[0]
    assert not first.mixed_versions
    assert first.candidates[2].started_at is None


async def test_the_oldest_of_too_many_waiting_groups_ends() -> None:
    harness = Harness()
    harness.groups.idle_groups = FairCache(2)
    for prompt in ("first", "second"):
        finish(harness.join(prompt, prompt=prompt), 4)
    running = harness.join("first again", prompt="first")
    finish(harness.join("third", prompt="third"), 4)
    assert harness.recorder.records == []
    finish(running, 4)
    assert [record.group_id for record in harness.recorder.records] == ["group-second"]
    assert harness.groups.idle_groups.size == 2
    await advance(WAIT)
    assert len(harness.recorder.records) == 3
    assert harness.groups.idle_groups.size == 0


async def test_a_stopping_server_waits_for_no_further_requests() -> None:
    harness = Harness()
    running = harness.join("r0")
    finish(harness.join("r1"), 4)
    finish(harness.join("q0", prompt="q"), 4)
    harness.groups.drain()
    assert [record.group_id for record in harness.recorder.records] == ["group-q0"]
    finish(running, 4)
    finish(harness.join("late"), 4)
    assert [record.size for record in harness.recorder.records] == [1, 2, 1]
    assert harness.closed == []


async def test_requests_that_leave_a_group_again_and_again_end_it() -> None:
    harness = Harness()
    for number in range(MOST_MEMBERS * PLAN.size + 1):
        harness.join(f"r{number}").leave(DiscardReason.CANCELLED)
    assert harness.record.outcome is Outcome.CANCELLED
    assert len(harness.record.candidates) == MOST_MEMBERS * PLAN.size
