import asyncio

import pytest

from darts_server.engine.scripted import settle
from darts_server.serving.gate import Gate


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


class Work:
    """Something that passes the gate and stays inside until it is told to end."""

    def __init__(self, gate: Gate, *, at_once: bool = False) -> None:
        self.inside = False
        self.over = asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, at_once))

    async def _run(self, gate: Gate, at_once: bool) -> None:
        async with gate.held(at_once=at_once):
            self.inside = True
            await self.over.wait()
        self.inside = False


async def test_an_open_gate_lets_all_in_and_counts_them() -> None:
    gate = Gate()
    works = [Work(gate) for _ in range(3)]
    await settle()
    assert gate.inside == 3
    for work in works:
        work.over.set()
    await settle()
    assert gate.inside == 0


async def test_a_closed_gate_keeps_newcomers_waiting_and_tells_when_it_is_empty() -> None:
    gate = Gate()
    old = Work(gate)
    await settle()
    gate.close()
    new, needed = Work(gate), Work(gate, at_once=True)
    empty = asyncio.create_task(gate.emptied())
    await settle()
    assert (old.inside, new.inside, needed.inside) == (True, False, True)
    old.over.set()
    await settle()
    assert not empty.done()
    needed.over.set()
    await settle()
    assert empty.done()
    assert not new.inside
    gate.open()
    await settle()
    assert new.inside
    new.over.set()
    await new.task


async def test_what_begins_inside_is_waited_for_too() -> None:
    gate = Gate()
    async with gate.held():
        gate.close()
        gate.let_in()
    empty = asyncio.create_task(gate.emptied())
    await settle()
    assert not empty.done()
    gate.leave()
    await asyncio.wait_for(empty, 1)


async def test_one_that_gives_up_while_it_waits_was_never_inside() -> None:
    gate = Gate()
    gate.close()
    work = Work(gate)
    await settle()
    work.task.cancel()
    await asyncio.gather(work.task, return_exceptions=True)
    gate.open()
    assert gate.inside == 0


async def test_one_that_is_cancelled_inside_leaves() -> None:
    gate = Gate()
    work = Work(gate)
    await settle()
    work.task.cancel()
    await asyncio.gather(work.task, return_exceptions=True)
    assert gate.inside == 0


async def test_a_condemned_gate_turns_away_those_who_wait_and_those_who_come() -> None:
    gate = Gate()
    gate.close()
    waiting = Work(gate)
    await settle()
    gate.condemn(LookupError("lost"))
    for work in (waiting, Work(gate), Work(gate, at_once=True)):
        with pytest.raises(LookupError):
            await work.task
    with pytest.raises(LookupError):
        gate.check()
