"""The soak: rounds of groups, and a look at everything when each is over."""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from faults.soak.callers import Callers
from faults.soak.house import House, Kept
from faults.soak.memory import Growth, Sample, growths, sample
from faults.soak.world import STEP_SECONDS, VirtualLoop

CALLERS = 96
LEAST_ROUNDS = 6
"""For a line through the second half of them."""
UPDATE_SECONDS = 0.3
"""Between two versions of the weights."""
MOST_IDLE_SECONDS = 600.0
"""After a round, until nothing runs, on the loop's clock."""
CLEARING_SECONDS = 1.0
"""For what is done after the last group's end."""


@dataclass
class Soaked:
    """``wrong``: what did not hold after a round. ``day``: seconds of the loop's clock."""

    asked: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    slowest: float = 0.0
    day: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        lost = self.ends.get("lost", 0) + self.ends.get("wrong", 0)
        return not (self.wrong or lost) and all(growth.flat for growth in self.growths)


def soak(
    groups: int,
    rounds: int,
    kept: Kept,
    state_dir: Path | None = None,
    seed: int = 0,
    told: Callable[[int], bool] = lambda _: True,
    spoil: Callable[[House], None] = lambda _: None,
) -> Soaked:
    """Run so many groups.

    ``told``: hears how many are done, and says whether to go on. ``spoil``: may break what is wired.
    """
    logger = logging.getLogger("darts_server")
    soaked = Soaked()
    logger.addHandler(listener := _Errors(soaked.wrong))
    gc.freeze()  # what is there already is none of our business, and takes long to look through
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_soak(soaked, groups, rounds, kept, state_dir, seed, told, spoil))
    finally:
        gc.unfreeze()
        logger.removeHandler(listener)
    return soaked


class _Errors(logging.Handler):
    """Whatever the server logs as an error did not hold: callers' own faults are none."""

    def __init__(self, wrong: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._wrong = wrong

    def emit(self, record: logging.LogRecord) -> None:
        self._wrong.append(f"logged: {self.format(record)}")


async def _soak(
    soaked: Soaked,
    groups: int,
    rounds: int,
    kept: Kept,
    state_dir: Path | None,
    seed: int,
    told: Callable[[int], bool],
    spoil: Callable[[House], None],
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    house = House(loop, kept, state_dir, seed)
    loop.set_exception_handler(lambda _, context: soaked.wrong.append(_told(context)))
    spoil(house)
    callers = Callers(house, seed)
    engine = asyncio.create_task(_drive(house))
    try:
        for number in range(rounds):
            first, last = groups * number // rounds, groups * (number + 1) // rounds
            await _round(house, callers, iter(range(first, last)))
            soaked.wrong += [f"after {last} groups: {what}" for what in _at_rest(house)]
            soaked.samples.append(sample(last))
            soaked.asked = last
            if not told(last):
                break
    finally:
        engine.cancel()
        house.close()
    soaked.ends, soaked.rewards, soaked.slowest, soaked.day = callers.ends, callers.told, callers.slowest, loop.time()
    soaked.updates = house.engine.weight_version
    soaked.outcomes = house.by("darts_groups_total", "outcome")
    soaked.reasons = house.by("darts_candidates_ended_total", "reason")
    if len(soaked.samples) >= LEAST_ROUNDS:
        soaked.growths = growths(soaked.samples[len(soaked.samples) // 2 :])


def _told(context: dict[str, Any]) -> str:
    return f"nobody caught {context.get('exception') or context['message']!r}"


async def _round(house: House, callers: Callers, numbers: Iterator[int]) -> None:
    """Play these groups to their end."""
    trainer = asyncio.create_task(_train(house))
    await asyncio.gather(*(callers.work(numbers) for _ in range(CALLERS)))
    await callers.rewarded()
    trainer.cancel()
    with suppress(asyncio.CancelledError):
        await trainer
    with suppress(TimeoutError):
        async with asyncio.timeout(MOST_IDLE_SECONDS):
            while house.rollouts.running or house.engine.unfinished:
                await asyncio.sleep(STEP_SECONDS)
    await asyncio.sleep(CLEARING_SECONDS)


async def _train(house: House) -> None:
    """New weights now and then, under each rule in turn."""
    for rule in cycle(("restart", "finish", "keep")):
        await asyncio.sleep(UPDATE_SECONDS)
        if rule != "keep":
            house.gate.close("weights")
        try:
            if rule == "finish":
                await house.gate.emptied()
            elif rule == "restart":
                await house.rollouts.halt()
            house.engine.weight_version += 1
        finally:
            house.rollouts.resume()
            house.gate.open("weights")


async def _drive(house: House) -> None:
    while True:
        await house.engine.step()


def _at_rest(house: House) -> Iterator[str]:
    """What is not as it must be when nobody asks for anything."""
    gauges = {
        "candidates on the engine": house.engine.unfinished,
        "groups that run": house.rollouts.running,
        "candidates that wait": house.rollouts.admission.waiting,
        "candidates let in": house.rollouts.admission.ahead,
        "pieces of work inside the gate": house.gate.inside,
        "candidates on the page": house.live.candidates,
        "faults of the store": int(house.store.fault is not None),
    }
    yield from (f"{what}: {count}, not 0" for what, count in gauges.items() if count)
    started, ended = house.count("darts_candidates_started_total"), house.count("darts_candidates_ended_total")
    if started != ended:
        yield f"{started:.0f} candidates were started, {ended:.0f} were selected or discarded"
    if house.count("darts_groups_total") != house.live.ended:
        yield f"{house.count('darts_groups_total'):.0f} groups were counted, {house.live.ended} ended"
