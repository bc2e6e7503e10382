import asyncio
from traceback import walk_tb

import pytest

from darts_server.engine.scripted import settle
from darts_server.serving.gate import Gate

pytestmark = pytest.mark.anyio


class Work:
    """Work that enters the gate and stays inside until ``finish`` is set."""

    def __init__(self, gate: Gate, *, skip_wait: bool = False) -> None:
        self.inside = False
        self.finish = asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, skip_wait))

    async def _run(self, gate: Gate, skip_wait: bool) -> None:
        async with gate.enter(skip_wait=skip_wait):
            self.inside = True
            await self.finish.wait()
        self.inside = False


async def test_the_opening_changes_when_the_gate_opens_again() -> None:
    gate = Gate()
    first = gate.opening_number
    gate.open()
    assert gate.opening_number == first is not None
    gate.close("trainer")
    gate.close("update")
    gate.open("update")
    assert gate.opening_number is None
    gate.open("trainer")
    assert gate.opening_number not in (None, first)


async def test_a_closed_gate_holds_new_work_back_until_it_opens() -> None:
    gate = Gate()
    old = Work(gate)
    await settle()
    gate.close()
    new = Work(gate)
    needed = Work(gate, skip_wait=True)
    empty = asyncio.create_task(gate.wait_until_empty())
    await settle()
    assert (old.inside, new.inside, needed.inside) == (True, False, True)
    old.finish.set()
    await settle()
    assert not empty.done()
    needed.finish.set()
    await settle()
    assert empty.done()
    assert not new.inside
    gate.open()
    await settle()
    assert new.inside
    new.finish.set()
    await new.task


async def test_the_gate_waits_for_work_that_was_let_in_while_it_was_closed() -> None:
    gate = Gate()
    async with gate.enter():
        gate.close()
        gate.let_in()
    empty = asyncio.create_task(gate.wait_until_empty())
    await settle()
    assert not empty.done()
    gate.leave()
    await asyncio.wait_for(empty, 1)


@pytest.mark.parametrize("waits", [True, False])
async def test_cancelled_work_is_not_inside(waits: bool) -> None:
    gate = Gate()
    if waits:
        gate.close()
    work = Work(gate)
    await settle()
    assert gate.work_inside == (not waits)
    work.task.cancel()
    await asyncio.gather(work.task, return_exceptions=True)
    gate.open()
    assert gate.work_inside == 0


async def test_a_failed_gate_raises_in_waiting_and_new_work() -> None:
    gate = Gate()
    gate.close()
    waiting = Work(gate)
    await settle()
    gate.fail(LookupError("lost"))
    for work in (waiting, Work(gate), Work(gate, skip_wait=True)):
        with pytest.raises(LookupError):
            await work.task
    with pytest.raises(LookupError):
        gate.raise_failure()
    # A later pause makes nobody wait.
    gate.close()
    with pytest.raises(LookupError):
        await Work(gate).task


async def test_the_error_of_a_failed_gate_keeps_no_frames() -> None:
    gate = Gate()
    error = LookupError("lost")
    gate.fail(error)
    depths = []
    for _ in range(2):
        with pytest.raises(LookupError):
            gate.raise_failure()
        depths.append(len(list(walk_tb(error.__traceback__))))
    assert depths[0] == depths[1]
