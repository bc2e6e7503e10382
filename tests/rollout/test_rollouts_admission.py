"""Groups while more candidates wait than the engine runs at once."""

import pytest

from darts_server.engine.scripted import settle
from darts_server.exceptions import InvalidRequest, Overloaded, QuotaReached
from darts_server.policy.allocation import Brownout
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Admission, Bounds, Caller, caller
from tests.rollout.batches.test_batch import batch_request, script, submit
from tests.rollout.helpers import Documents, Harness, Recorder, lengths

pytestmark = pytest.mark.anyio
CAPACITY = 4
PROMPTS = ["20", "30", "40"]
STARTED = 18
"""Candidates of these prompts: 6 for each group of ``SIZE``."""


class FullHarness(Harness):
    """A harness whose engine runs ``CAPACITY`` candidates at once, and whose redundancy falls from there on."""

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
        self.recorder = Recorder(self.rollouts.observers)


async def test_redundancy_falls_as_the_queue_grows_and_recovers_when_it_is_empty() -> None:
    harness = FullHarness()
    runs, candidates = [], []
    for number in range(5):
        plan = harness.plan(4, "uniform")
        grant = await harness.rollouts.allocator.allocate(plan, "p")
        runs.append(harness.rollouts.start(GroupSpec.of_plan(plan, "p", str(number)), plan, grant))
        await settle()
        candidates.append(grant.candidates)
    # Waiting before each: 0, 4, 12, 17, 21; the scale falls from 1 at 4 to 0 at 16.
    assert candidates == [8, 8, 5, 4, 4]
    assert harness.rollouts.redundancy_scale() == 0
    for run in runs:
        run.cancel()
    await settle()
    assert harness.rollouts.redundancy_scale() == 1


async def test_a_batch_is_refused_while_the_queue_is_too_long_and_starts_nothing() -> None:
    harness = Harness(script)
    waiting = 0
    harness.rollouts.admission = Admission(lambda: CAPACITY + waiting, CAPACITY, Bounds(max_waiting=8 + STARTED))
    waiting = 9
    with pytest.raises(Overloaded, match=f"9 candidates wait .* with {STARTED} more"):
        await submit(harness, batch_request(*PROMPTS))
    waiting = 8
    await submit(harness, batch_request(*PROMPTS))
    with pytest.raises(Overloaded):
        await submit(harness, batch_request("20"))
    assert not harness.engine.started


async def test_a_batch_counts_with_all_its_candidates_until_it_has_ended() -> None:
    harness = Harness(script)
    harness.rollouts.admission = Admission(lambda: 0, None, Bounds(max_per_caller=STARTED))
    token = caller.set(Caller("one"))
    with pytest.raises(InvalidRequest, match="a key may have") as error:
        await submit(harness, batch_request(*PROMPTS, "50"))
    assert error.value.field == "prompts"
    batch = await submit(harness, batch_request(*PROMPTS))
    await settle()
    caller.set(Caller("one"))
    with pytest.raises(QuotaReached):
        await submit(harness, batch_request("20"))
    await harness.engine.run()
    assert len((await batch.wait()).results) == len(PROMPTS)
    assert harness.rollouts.admission.requests == 0
    await submit(harness, batch_request(*PROMPTS))
    caller.reset(token)
