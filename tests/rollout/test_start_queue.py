"""Candidates and groups that start a few at a time."""

import asyncio

import pytest

from darts_server.rollout.start_queue import CANDIDATE_COST, TURN, StartQueue

A_TURN = TURN // CANDIDATE_COST

pytestmark = pytest.mark.anyio


class Starts:
    """Count what has started, in its order."""

    def __init__(self) -> None:
        self.queue = StartQueue()
        self.order: list[str] = []

    async def candidate(self, name: str, carried_tokens: int = 0) -> None:
        await self.queue.candidate(carried_tokens)
        self.order.append(name)

    async def group(self, name: str, candidates: int) -> None:
        await self.queue.group(candidates)
        self.order.append(name)
        async with asyncio.TaskGroup() as tasks:
            for i in range(candidates):
                tasks.create_task(self.candidate(f"{name}{i}"))


async def test_candidates_that_go_on_from_many_tokens_start_fewer_at_a_time() -> None:
    starts = Starts()
    tasks = [asyncio.create_task(starts.candidate(str(i), 2000)) for i in range(5)]
    for _ in range(3):
        before = len(starts.order)
        await asyncio.sleep(0)
        assert len(starts.order) - before <= 1
    await asyncio.wait(tasks, timeout=5)
    assert starts.order == list("01234")


async def test_a_few_candidates_start_at_once_and_the_others_in_later_turns_in_their_order() -> None:
    starts = Starts()
    count = 3 * A_TURN + 1
    tasks = [asyncio.create_task(starts.candidate(str(i))) for i in range(count)]
    await asyncio.sleep(0)
    assert len(starts.order) == A_TURN
    for _ in range(4):
        before = len(starts.order)
        await asyncio.sleep(0)
        assert len(starts.order) - before <= A_TURN
    await asyncio.gather(*tasks)
    assert starts.order == [str(i) for i in range(count)]


async def test_nothing_waits_that_comes_alone() -> None:
    queue = StartQueue()
    for _ in range(3 * A_TURN):
        await asyncio.wait_for(queue.candidate(), 5)
    await asyncio.wait_for(queue.group(2 * TURN), 5)


async def test_a_group_starts_when_no_candidate_waits() -> None:
    starts = Starts()
    await asyncio.gather(*(starts.group(name, TURN) for name in "abc"))
    candidates = [name for name in starts.order if len(name) > 1]
    assert candidates == [f"{name}{i}" for name in "abc" for i in range(TURN)]
    # The second group starts in the turn in which the first one makes its candidates.
    assert starts.order.index("c") > starts.order.index(f"b{TURN - 1}") > starts.order.index("b")


async def test_one_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    starts = Starts()
    tasks = [asyncio.create_task(starts.candidate(str(i))) for i in range(3 * A_TURN)]
    groups = [asyncio.create_task(starts.group(name, 2)) for name in "ab"]
    await asyncio.sleep(0)
    for task in (*tasks[A_TURN:-1], groups[0]):
        task.cancel()
    await asyncio.gather(*tasks, *groups, return_exceptions=True)
    assert starts.order == [*(str(i) for i in range(A_TURN)), str(3 * A_TURN - 1), "b", "b0", "b1"]
