"""Trajectories that their callers abort: what they had generated is returned once, and their groups go on."""

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from darts_server.engine.port import TokenSlice
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, Conflict, GroupAborted, NotFound
from darts_server.rollout.aborting import AbortedTrajectory, TrajectoryAborter
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.carried import CarriedCandidate
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.run import GroupRun, Trajectory
from darts_server.rollout.spec import GroupSpec, OnAbort
from darts_server.serving.admission import Caller, caller
from darts_server.types import DiscardReason, FinishReason, Outcome
from tests.rollout.batches.test_submission import Texts
from tests.rollout.helpers import Harness, collect, lengths

pytestmark = pytest.mark.anyio
ABORTED = DiscardReason.ABORTED


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_caller() -> Iterator[None]:
    token = caller.set(Caller())
    yield
    caller.reset(token)


class Aborting:
    """A group of ``size`` that runs on the scripted engine, and its collected trajectories."""

    def __init__(self, size: int, *each: int, policy: str = "shortest") -> None:
        self.harness = Harness(lengths(*each))
        self.size = size
        self.policy = policy
        self.provenance = Provenance()
        self.harness.rollouts.observe(self.provenance)
        self.aborter = TrajectoryAborter(self.harness.rollouts, Texts(), self.provenance)
        self.run: GroupRun[str, list[int]]

    def start(self, *carried: CarriedCandidate[list[int]]) -> asyncio.Task[list[Trajectory[list[int]]]]:
        plan = self.harness.plan(self.size, self.policy)
        spec = GroupSpec.of_plan(plan, "g", "a/g", "g", (7,), on_abort=OnAbort.CARRY)
        allocation = Allocation(plan.shaping.candidates(self.size))
        self.run = self.harness.rollouts.start(spec, plan, allocation, carried=carried)
        return asyncio.create_task(collect(self.run))

    async def steps(self, count: int) -> None:
        await settle()
        for _ in range(count):
            await self.harness.engine.step()

    async def abort(self, index: int) -> AbortedTrajectory:
        return await self.aborter.abort(f"a/g:{index}")

    async def end(self, waiting: "asyncio.Task[list[Trajectory[list[int]]]]") -> list[tuple[int, int]]:
        """Run the group to its end; index and length of each trajectory."""
        await self.harness.engine.run()
        return [(t.index, len(t.output)) for t in await waiting]

    @property
    def reasons(self) -> list[DiscardReason | None]:
        [record] = self.harness.recorder.records
        return [c.reason for c in record.candidates]


async def test_an_aborted_trajectory_is_returned_as_far_as_it_got_and_its_group_does_without_it() -> None:
    group = Aborting(4, 9, 9, 9, 9, 9, 9)
    waiting = group.start()
    await group.steps(3)
    group.harness.engine.weight_version = 1
    aborted = await group.abort(1)
    assert (aborted.trajectory_id, list(aborted.sample.token_ids)) == ("a/g:1", [0, 1, 2])
    assert aborted.sample.logprobs == [0, -1 / 8, -2 / 8]
    assert (aborted.record.tokens, aborted.record.reason) == (3, ABORTED)
    assert await group.end(waiting) == [(0, 9), (2, 9), (3, 9), (4, 9)]
    assert len(group.harness.engine.started) == 6, "none was started in its place: the others are enough"
    [record] = group.harness.recorder.records
    assert (record.candidates[1].tokens, record.candidates[1].reason, record.counted) == (3, ABORTED, 5)


async def test_another_starts_in_the_place_of_one_that_the_group_needs() -> None:
    group = Aborting(4, 9)
    waiting = group.start()
    await group.steps(3)
    for index in (0, 1, 2):
        await group.abort(index)
    assert await group.end(waiting) == [(3, 9), (4, 9), (5, 9), (6, 9)]
    assert group.reasons == [ABORTED] * 3 + [None] * 4


async def test_a_group_of_which_too_many_are_aborted_fails() -> None:
    group = Aborting(2, 9)
    waiting = group.start()
    await group.steps(2)
    for index in range(4):
        await group.abort(index)
        await settle()
    with pytest.raises(GroupAborted, match="the caller aborted candidate 3"):
        await waiting
    assert group.reasons == [*[ABORTED] * 4, DiscardReason.CANCELLED]
    assert group.harness.recorder.records[0].outcome is Outcome.FAILED


async def test_the_versions_that_sampled_the_tokens_are_returned() -> None:
    group = Aborting(2, 9)
    waiting = group.start()
    await group.steps(3)
    group.harness.rollouts.weights_change()
    group.harness.engine.weight_version = 1
    await group.steps(2)
    aborted = await group.abort(0)
    assert aborted.record.version_spans == ((0, 3), (1, 2))
    assert (aborted.record.weight_version_start, aborted.record.weight_version_end) == (0, 1)
    await group.end(waiting)


async def test_one_that_has_not_reached_the_engine_has_generated_nothing_and_never_reaches_it() -> None:
    group = Aborting(2, 9)
    waiting = group.start()
    assert list((await group.abort(1)).sample.token_ids) == []
    assert [index for index, _ in await group.end(waiting)] == [0, 2]
    assert len(group.harness.engine.started) == 2


async def test_one_that_was_carried_over_and_waits_to_go_on_returns_what_it_had() -> None:
    group = Aborting(2, 9)
    prefix: CarriedCandidate[list[int]] = CarriedCandidate(TokenSlice([0, 1, 2, 3], [0.0] * 4), ((5, 4),), None)
    group.harness.engine.weight_version = 6
    waiting = group.start(CarriedCandidate(), prefix)
    aborted = await group.abort(1)
    assert (list(aborted.sample.token_ids), aborted.record.version_spans) == ([0, 1, 2, 3], ((5, 4),))
    assert [index for index, _ in await group.end(waiting)] == [0, 2]


async def test_what_was_aborted_is_not_carried_over_again() -> None:
    group = Aborting(2, 9)
    waiting = group.start()
    await group.steps(3)
    await group.abort(1)
    await group.steps(2)
    group.run.stop_to_carry()
    assert [candidate.tokens for candidate in await group.run.carried()] == [5, 5]
    assert group.reasons == [DiscardReason.CARRIED, ABORTED, DiscardReason.CARRIED]
    waiting.cancel()


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
async def test_what_is_being_aborted_while_its_group_is_carried_over_belongs_to_one_of_them(
    steps: int, finishes: bool
) -> None:
    group = Aborting(2, 9)
    group.harness.engine.stop_lag = 5
    waiting = group.start()
    await group.steps(steps)
    aborting = asyncio.create_task(group.abort(1))
    await asyncio.sleep(0)
    group.run.stop_to_carry()
    carrying = asyncio.create_task(group.run.carried())
    await asyncio.sleep(0)
    if finishes:
        for candidate in group.harness.engine.running:
            candidate._finish(FinishReason.STOP)
    aborted = await aborting
    assert (len(aborted.sample.token_ids), aborted.record.reason) == (steps, ABORTED)
    assert [candidate.tokens for candidate in await carrying] == [steps] * 2
    assert group.reasons == [DiscardReason.CARRIED, ABORTED, DiscardReason.CARRIED]
    waiting.cancel()


async def test_all_that_abort_it_at_the_same_time_get_it_and_later_ones_are_refused() -> None:
    group = Aborting(4, 9)
    waiting = group.start()
    await group.steps(3)
    first, second = await asyncio.gather(group.abort(1), group.abort(1))
    assert first == second
    with pytest.raises(Conflict, match=r"'a/g:1' was discarded \(aborted\)"):
        await group.abort(1)
    await group.end(waiting)


@pytest.mark.parametrize("ended", [False, True])
async def test_one_that_has_ended_is_refused_with_how_it_ended(ended: bool) -> None:
    group = Aborting(3, 3, 4, 20, 30, 30, policy="uniform")
    waiting = group.start()
    await group.steps(5)
    if ended:
        await group.end(waiting)
    with pytest.raises(Conflict, match=r"'a/g:0' has finished \(stop\)") as refused:
        await group.abort(0)
    assert refused.value.field == "trajectory_id"
    before = len(group.harness.engine.started)
    if not ended:
        await group.end(waiting)
    assert len(group.harness.engine.started) == before
    assert group.reasons[0] is None


@pytest.mark.parametrize(("error", "how"), [(None, "has finished"), (CandidateFailed("no memory"), "failed")])
async def test_one_that_finishes_or_fails_at_that_moment_counts_as_such(error: Exception | None, how: str) -> None:
    group = Aborting(2, 9)
    group.harness.engine._script = lambda _, index: Script(3 if index == 0 else 9, error=error)
    waiting = group.start()
    await group.steps(2)
    [candidate] = [c for c in group.harness.engine.running if c.index == 0]
    candidate.step(100)  # the engine has its result, and nothing has read it
    with pytest.raises(Conflict, match=how):
        await group.abort(0)
    waiting.cancel()


@pytest.mark.parametrize("name", ["a/g:9", "a/g", "a/g:", "a/g:x", "a/g:-1", "a/g:²", f"a/g:{'9' * 5000}", "b:0", ""])
@pytest.mark.parametrize("ended", [False, True])
async def test_what_is_no_trajectory_is_not_found(name: str, ended: bool) -> None:
    group = Aborting(2, 4)
    waiting = group.start()
    await group.steps(1)
    if ended:
        await group.end(waiting)
    with pytest.raises(NotFound):
        await group.aborter.abort(name)
    assert ended or len(await group.end(waiting)) == 2


@pytest.mark.parametrize("ended", [False, True])
async def test_the_trajectories_of_others_are_not_found_but_by_an_admin(ended: bool) -> None:
    caller.set(Caller("one"))
    group = Aborting(2, 4)
    waiting = group.start()
    await group.steps(1)
    if ended:
        await group.end(waiting)
    caller.set(Caller("another"))
    with pytest.raises(NotFound):
        await group.abort(0)
    caller.set(Caller("admin", is_admin=True))
    if ended:
        with pytest.raises(Conflict):
            await group.abort(0)
    else:
        assert list((await group.abort(0)).sample.token_ids) == [0]
        assert [index for index, _ in await group.end(waiting)] == [1, 2]


async def test_of_two_running_groups_with_one_id_each_caller_aborts_its_own() -> None:
    group = Aborting(2, 9)
    caller.set(Caller("one"))
    first = group.start()
    await group.steps(3)
    caller.set(Caller("another"))
    second = group.start()
    await group.steps(1)
    caller.set(Caller("one"))
    assert list((await group.abort(1)).sample.token_ids) == [0, 1, 2, 3]
    caller.set(Caller("admin", is_admin=True))
    with pytest.raises(Conflict, match="'a/g:0' is ambiguous: 2 running groups have the id 'a/g'"):
        await group.abort(0)
    assert [index for index, _ in await group.end(first)] == [0, 2]
    assert [index for index, _ in await group.end(second)] == [0, 1]


@pytest.mark.parametrize("seed", range(60))
async def test_aborts_at_random_moments_leave_groups_whole_and_nothing_running(seed: int) -> None:
    rng = Random(seed)
    harness = Harness(lambda _, __: Script(rng.randint(1, 12), rng.choice([0, 0, 3]), rng.choice(list(FinishReason))))
    aborter = TrajectoryAborter(harness.rollouts, Texts(), Provenance())
    groups = {f"g{i}": harness.run(4, rng.choice(["shortest", "uniform", "longest"]), group_id=f"g{i}") for i in (0, 1)}
    waiting = {name: asyncio.create_task(collect(run)) for name, run in groups.items()}
    returned: dict[str, int] = {}
    aborts = 3  # fewer than end a group
    for _ in range(60):
        if rng.random() < 0.3:
            await harness.engine.step()
        elif rng.random() < 0.5:
            await asyncio.sleep(0)
        elif aborts:
            name = f"g{rng.randrange(2)}:{rng.randrange(7)}"
            try:
                aborted = await asyncio.wait_for(aborter.abort(name), 5)
            except (Conflict, NotFound):
                continue
            assert returned.setdefault(name, len(aborted.sample.token_ids)) == len(aborted.sample.token_ids)
            aborts -= 1
    await harness.engine.run()
    for name, task in waiting.items():
        assert len(await task) == 4
        for candidate in harness.record(name).candidates:
            tokens = returned.get(f"{name}:{candidate.index}")
            assert (tokens is not None) >= (candidate.reason is ABORTED)
            assert tokens is None or (candidate.selected_as is None and candidate.tokens <= tokens)
    assert harness.engine.running == []
    assert harness.rollouts.running == 0
