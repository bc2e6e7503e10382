"""When candidates start: a few at a time, and in order on an engine with priorities, here the scripted one."""

import asyncio
from collections.abc import Mapping
from random import Random

import pytest

from darts_server.engine.port import TokenSlice
from darts_server.engine.scripted import Script, settle
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.rollout.start_queue import CANDIDATE_COST, MAX_TURN_COST, TOKEN_SECONDS, StartQueue
from tests.rollout.helpers import Harness
from tests.rollout.joining.joining import SteppedLoop

SIZE = 2
SHAPINGS = {"two": Shaping(redundancy=1.0, num_longest=0), "more": Shaping(redundancy=2.0, num_longest=0)}
A_TURN = MAX_TURN_COST // CANDIDATE_COST

pytestmark = pytest.mark.anyio


class Starts:
    """Count what has started, in its order."""

    def __init__(self) -> None:
        self.queue = StartQueue()
        self.order: list[str] = []

    async def candidate(self, name: str, carried_tokens: int = 0) -> None:
        await self.queue.wait_for_candidate(carried_tokens)
        self.order.append(name)

    async def group(self, name: str, candidates: int) -> None:
        await self.queue.wait_for_group(candidates)
        self.order.append(name)
        async with asyncio.TaskGroup() as tasks:
            for i in range(candidates):
                tasks.create_task(self.candidate(f"{name}{i}"))


@pytest.mark.parametrize(("carried_tokens", "a_turn"), [(0, A_TURN), (2000, 1)])
async def test_a_few_candidates_start_at_once_and_the_others_in_later_turns_in_their_order(
    carried_tokens: int, a_turn: int
) -> None:
    starts = Starts()
    count = 3 * a_turn + 1
    tasks = [asyncio.create_task(starts.candidate(str(i), carried_tokens)) for i in range(count)]
    await asyncio.sleep(0)
    assert len(starts.order) == a_turn
    for _ in range(4):
        before = len(starts.order)
        await asyncio.sleep(0)
        assert len(starts.order) - before <= a_turn
    await asyncio.gather(*tasks)
    assert starts.order == [str(i) for i in range(count)]


async def test_a_start_without_others_does_not_wait() -> None:
    queue = StartQueue()
    for _ in range(3 * A_TURN):
        await asyncio.wait_for(queue.wait_for_candidate(0), 5)
    await asyncio.wait_for(queue.wait_for_group(2 * MAX_TURN_COST), 5)


async def test_a_group_starts_when_no_candidate_waits() -> None:
    starts = Starts()
    await asyncio.gather(*(starts.group(name, MAX_TURN_COST) for name in "abc"))
    candidates = [name for name in starts.order if len(name) > 1]
    assert candidates == [f"{name}{i}" for name in "abc" for i in range(MAX_TURN_COST)]
    # The second group starts in the turn in which the first one makes its candidates.
    assert starts.order.index("c") > starts.order.index(f"b{MAX_TURN_COST - 1}") > starts.order.index("b")


async def test_a_cancelled_start_takes_no_turn() -> None:
    starts = Starts()
    tasks = [asyncio.create_task(starts.candidate(str(i))) for i in range(3 * A_TURN)]
    groups = [asyncio.create_task(starts.group(name, 2)) for name in "ab"]
    await asyncio.sleep(0)
    for task in (*tasks[A_TURN:-1], groups[0]):
        task.cancel()
    await asyncio.gather(*tasks, *groups, return_exceptions=True)
    assert starts.order == [*(str(i) for i in range(A_TURN)), str(3 * A_TURN - 1), "b", "b0", "b1"]


# --- the order -------------------------------------------------------------------


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


def new_harness(means: Mapping[str, float], slots: int, *, has_priorities: bool = True) -> Harness:
    """Prompts have the lengths of their names; ``means``: what is expected of them."""
    harness = Harness(lambda text, index: Script(int(text)), SHAPINGS)
    for key, mean in means.items():
        stats = {"std_ema": 1.0, "mean_ema": mean, "groups": 1, "candidates": 12, "weight_version": 0}
        harness.store.put("prompt", key, stats)
    harness.engine.slots, harness.engine.has_priorities = slots, has_priorities
    return harness


async def run_all(harness: Harness, texts: list[str], policy: str = "two") -> dict[str, list[tuple[int, int]]]:
    """Run groups that come in this order; return index and length of their trajectories."""
    groups = await harness.groups([harness.run(SIZE, policy, group_id=text) for text in texts])
    return {text: [(t.index, len(t.output)) for t in group] for text, group in zip(texts, groups, strict=True)}


def started(harness: Harness) -> list[str]:
    """Prompts in the order in which their candidates have got slots."""
    return [c.request for c in sorted(harness.engine.started, key=lambda candidate: candidate.started_at)]


async def test_candidates_that_are_expected_to_be_longest_start_first() -> None:
    harness = new_harness({"10": 10, "200": 200, "50": 50}, slots=2)
    await run_all(harness, ["10", "50", "200"])
    assert started(harness) == ["200", "200", "50", "50", "10", "10"]


async def test_the_order_shortens_a_rollout_and_does_not_change_its_groups() -> None:
    rng = Random(4)
    texts = [str(rng.choice([5, 8, 13, 20]) * 10 + number) for number in range(15)] + ["400"]
    expected = {text: float(text) for text in texts}
    steps, found = {}, {}
    for has_priorities in (False, True):
        harness = new_harness(expected, slots=8, has_priorities=has_priorities)
        found[has_priorities] = await run_all(harness, texts, "more")
        steps[has_priorities] = harness.engine.now
    assert found[True] == found[False]
    assert steps[True] < 0.9 * steps[False], steps


async def test_a_request_that_has_waited_long_starts_before_a_longer_request() -> None:
    harness = new_harness({"60": 60, "10": 10, "100": 100}, slots=2)
    running = [await harness.begin(harness.run(SIZE, "two", group_id=text)) for text in ("60", "10")]
    await harness.steps(int(90 * TOKEN_SECONDS) + 1)
    running.append(await harness.begin(harness.run(SIZE, "two", group_id="100")))
    await harness.engine.run()
    await asyncio.gather(*running)
    assert started(harness) == ["60", "60", "10", "10", "100", "100"]


STRAGGLER: CarriedCandidate[list[int]] = CarriedCandidate(TokenSlice(range(80), None), ((0, 80),))


def start(harness: Harness, text: str, *carried: CarriedCandidate[list[int]]) -> GroupRun[str, list[int]]:
    spec = GroupSpec(harness.plan(SIZE, "two"), text, text, text, (1,))
    return harness.rollouts.start(spec, Allocation(SIZE), carried=carried)


async def test_resumed_stragglers_start_first() -> None:
    harness = new_harness({"90": 20, "50": 50}, slots=2)
    await harness.groups([start(harness, "50"), start(harness, "90", STRAGGLER, STRAGGLER)])
    assert started(harness) == ["90", "90", "50", "50"]


async def test_the_replacement_of_a_lost_straggler_resumes_from_the_same_tokens() -> None:
    harness = new_harness({"90": 90}, slots=8)
    waiting = await harness.begin(start(harness, "90", STRAGGLER, CarriedCandidate()))
    for candidate in harness.engine.running:
        candidate.abort_as_lost()
    await settle()
    assert sorted(candidate.generated for candidate in harness.engine.running) == [0, 80]
    await harness.engine.run()
    assert sorted(trajectory.index for trajectory in await waiting) == [2, 3]
