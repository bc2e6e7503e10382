"""What becomes of groups while more waits than the engine runs at once."""

import asyncio

import pytest

from darts_server.engine.scripted import settle
from darts_server.exceptions import InvalidRequest, Overloaded, QuotaReached
from darts_server.policy.allocation.brownout import Brownout
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Admission, Bounds, Caller, caller
from tests.rollout.batches.test_submission import SIZE, asked, script, submit
from tests.rollout.helpers import Documents, House, lengths

pytestmark = pytest.mark.anyio
CAPACITY = 4
PROMPTS = ["20", "30", "40"]


class Full(House):
    """A house whose engine runs ``CAPACITY`` candidates at once, and whose redundancy falls from there on."""

    def __init__(self, max_waiting: int = 16) -> None:
        super().__init__(lengths(5))
        self.engine.capacity = CAPACITY
        admission = Admission(lambda: self.engine.unfinished, CAPACITY, Bounds(max_waiting))
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            Planner({"uniform": Shaping(redundancy=2.0, num_longest=0)}, "uniform", self.limits),
            Statistics(Documents(), CAPACITY),
            Intervals(poll=0),
            admission=admission,
            brownout=Brownout.for_queue(max_waiting, CAPACITY, 0.0),
        )
        self.rollouts.observe(self.recorder)


async def test_redundancy_falls_as_the_queue_grows_and_is_back_when_it_has_gone() -> None:
    house = Full()
    runs, candidates = [], []
    for number in range(5):
        plan = house.plan(4, "uniform")
        grant = await house.rollouts.allocator.allocate(plan, "p")
        runs.append(house.rollouts.start(GroupSpec.of_plan(plan, "p", str(number)), plan, grant))
        await settle()
        candidates.append(grant.candidates)
    # Waiting before each: 0, 4, 12, 17, 21; the scale falls from 1 at 4 to 0 at 16.
    assert candidates == [8, 8, 5, 4, 4]
    assert house.rollouts.redundancy_scale() == 0
    for run in runs:
        run.leave()
    await settle()
    assert house.rollouts.redundancy_scale() == 1


async def test_a_batch_is_refused_while_the_queue_is_too_long_and_nothing_of_it_begins() -> None:
    house = House(script)
    waiting = 0
    house.rollouts.admission = Admission(lambda: CAPACITY + waiting, CAPACITY, Bounds(max_waiting=8))
    waiting = 7
    await submit(house, asked(*PROMPTS))
    waiting = 8
    with pytest.raises(Overloaded, match="8 candidates wait"):
        await submit(house, asked(*PROMPTS))
    assert not house.engine.started


async def test_a_batch_counts_with_all_its_candidates_until_it_has_ended() -> None:
    house = House(script)
    most = len(PROMPTS) * SIZE
    house.rollouts.admission = Admission(lambda: 0, None, Bounds(max_per_caller=most))
    token = caller.set(Caller("one"))
    with pytest.raises(InvalidRequest, match="a key may have") as error:
        await submit(house, asked(*PROMPTS, "50"))
    assert error.value.field == "prompts"
    submission = await submit(house, asked(*PROMPTS))

    async def play() -> int:
        return len([result async for result in submission.results()])

    playing = asyncio.create_task(play())
    await settle()
    with pytest.raises(QuotaReached):
        await submit(house, asked("20"))
    await house.engine.run()
    assert await playing == len(PROMPTS)
    await submit(house, asked(*PROMPTS))
    caller.reset(token)
