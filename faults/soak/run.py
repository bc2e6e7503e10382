"""Run rounds of groups, and check everything after each."""

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
from faults.soak.engine import STEP_SECONDS, VirtualLoop
from faults.soak.memory import Growth, Sample, measure_growth, sample
from faults.soak.stack import Retention, Stack

CALLERS = 96
MIN_ROUNDS = 6
"""Needed to fit a line through the second half of them."""
UPDATE_SECONDS = 0.3
"""Between two weight updates."""
DRAIN_SECONDS = 600.0
"""How long running work may take after a round, on the loop's clock."""
CLEANUP_SECONDS = 1.0
"""For what the server does after the last group."""


@dataclass
class Soaked:
    """The result of a soak.

    Attributes:
        groups: how many were requested.
        requests: requests by how they ended.
        outcomes: groups by outcome.
        reasons: candidates by why they ended.
        rewards: reported rewards by what the server did with them.
        updates: weight updates.
        longest_wait: of a request, in seconds of the loop's clock.
        loop_seconds: the whole soak on that clock.
        violations: checks that failed after a round.
    """

    groups: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    longest_wait: float = 0.0
    loop_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        lost = self.requests.get("lost", 0) + self.requests.get("wrong", 0)
        return not (self.violations or lost) and all(growth.flat for growth in self.growths)


def soak(
    groups: int,
    rounds: int,
    retention: Retention,
    state_dir: Path | None = None,
    seed: int = 0,
    has_time: Callable[[int], bool] = lambda _: True,
    spoil: Callable[[Stack], None] = lambda _: None,
) -> Soaked:
    """Run this many groups.

    Args:
        has_time: called after each round with the number of finished groups; the soak stops when it returns false.
        spoil: called with the stack before the first round; may break it, to test the checks.
    """
    logger = logging.getLogger("darts_server")
    soaked = Soaked()
    logger.addHandler(listener := _ErrorLogs(soaked.violations))
    gc.freeze()  # objects from before the soak do not count, and take long to walk through
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_soak(soaked, groups, rounds, retention, state_dir, seed, has_time, spoil))
    finally:
        gc.unfreeze()
        logger.removeHandler(listener)
    return soaked


class _ErrorLogs(logging.Handler):
    """Record every logged error as a violation: the server does not log callers' own mistakes as errors."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(f"logged: {self.format(record)}")


async def _soak(
    soaked: Soaked,
    groups: int,
    rounds: int,
    retention: Retention,
    state_dir: Path | None,
    seed: int,
    has_time: Callable[[int], bool],
    spoil: Callable[[Stack], None],
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    stack = Stack(loop, retention, state_dir, seed)
    loop.set_exception_handler(lambda _, context: soaked.violations.append(_describe(context)))
    spoil(stack)
    callers = Callers(stack, seed)
    engine = asyncio.create_task(_drive(stack))
    try:
        for number in range(rounds):
            first, last = groups * number // rounds, groups * (number + 1) // rounds
            await _round(stack, callers, iter(range(first, last)))
            soaked.violations += [f"after {last} groups: {what}" for what in _violations(stack)]
            soaked.samples.append(sample(last))
            soaked.groups = last
            if not has_time(last):
                break
    finally:
        engine.cancel()
        stack.close()
    soaked.requests, soaked.rewards = callers.requests, callers.rewards
    soaked.longest_wait, soaked.loop_seconds = callers.longest_wait, loop.time()
    soaked.updates = stack.engine.weight_version
    soaked.outcomes = stack.count_by("darts_groups_total", "outcome")
    soaked.reasons = stack.count_by("darts_candidates_ended_total", "reason")
    if len(soaked.samples) >= MIN_ROUNDS:
        soaked.growths = measure_growth(soaked.samples[len(soaked.samples) // 2 :])


def _describe(context: dict[str, Any]) -> str:
    return f"uncaught: {context.get('exception') or context['message']!r}"


async def _round(stack: Stack, callers: Callers, numbers: Iterator[int]) -> None:
    """Run these groups until nothing is running."""
    trainer = asyncio.create_task(_train(stack))
    await asyncio.gather(*(callers.work(numbers) for _ in range(CALLERS)))
    await callers.wait_for_background()
    trainer.cancel()
    with suppress(asyncio.CancelledError):
        await trainer
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while stack.rollouts.running or stack.engine.unfinished:
                await asyncio.sleep(STEP_SECONDS)
    await asyncio.sleep(CLEANUP_SECONDS)


async def _train(stack: Stack) -> None:
    """Update the weights again and again, under each rule in turn."""
    for rule in cycle(("restart", "finish", "keep")):
        await asyncio.sleep(UPDATE_SECONDS)
        if rule != "keep":
            stack.gate.close("weights")
        try:
            if rule == "finish":
                await stack.gate.wait_until_empty()
            elif rule == "restart":
                await stack.rollouts.suspend()
            stack.engine.weight_version += 1
        finally:
            stack.rollouts.resume()
            stack.gate.open("weights")


async def _drive(stack: Stack) -> None:
    while True:
        await stack.engine.step()


def _violations(stack: Stack) -> Iterator[str]:
    """Check that an idle server holds nothing, and that its counters agree."""
    gauges = {
        "candidates on the engine": stack.engine.unfinished,
        "groups running": stack.rollouts.running,
        "candidates waiting": stack.rollouts.admission.waiting,
        "candidates admitted": stack.rollouts.admission.ahead,
        "requests inside the gate": stack.gate.inside,
        "candidates in the monitor": stack.monitor.candidates,
        "faults of the store": int(stack.store.fault is not None),
    }
    yield from (f"{what}: {count}, not 0" for what, count in gauges.items() if count)
    started, ended = stack.count("darts_candidates_started_total"), stack.count("darts_candidates_ended_total")
    if started != ended:
        yield f"{started:.0f} candidates were started, {ended:.0f} were selected or discarded"
    if stack.count("darts_groups_total") != stack.monitor.ended:
        yield f"{stack.count('darts_groups_total'):.0f} groups were counted, {stack.monitor.ended} ended"
