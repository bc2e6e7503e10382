"""An engine that follows a script, on a clock of its own: for tests of the rooms above it.

Usage::

    engine = ScriptedEngine(lambda request, index: Script(length=10 + index))
    running = await engine.start("prompt", 0)
    await engine.run()           # until nothing runs
    (await running.ended()).tokens   # 10
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from darts_server.engine.port import Ended, Generated, Probe, Probed
from darts_server.exceptions import CandidateFailed, EngineDead
from darts_server.types import FinishReason

# Turns of the event loop between two steps: enough for every waiter to run and to start or stop others in answer.
SETTLE_TURNS = 12


@dataclass(frozen=True, slots=True)
class Script:
    """How one candidate goes: it waits ``delay`` steps, then makes a token a step.

    At ``length`` tokens it ends with ``reason``; with ``error`` it raises instead, with ``lost`` the engine aborts it.
    ``hidden`` gives the hidden state at its n-th token; a probe is told of it ``lag`` steps later.
    """

    length: int
    delay: int = 0
    reason: FinishReason = FinishReason.STOP
    error: Exception | None = None
    lost: bool = False
    hidden: Callable[[int], Sequence[float]] | None = None
    lag: int = 0


@dataclass(slots=True)
class ScriptedCandidate:
    """One running candidate; its output is the list of its token ids, ``[0, 1, 2, …]``, of log-probs -0, -1/8, -2/8."""

    request: str
    index: int
    script: Script
    born: int
    made: int = 0
    probe: Probe | None = None
    _states: list[tuple[int, Probed]] = field(default_factory=list)
    _end: asyncio.Future[Ended[list[int]]] = field(default_factory=asyncio.Future)

    @property
    def alive(self) -> bool:
        return not self._end.done()

    def tokens(self) -> int | None:
        return self.made if self.alive else None

    def generated(self, start: int) -> Generated | None:
        return generated(list(range(self.made)), start) if self.alive else None

    def stop(self) -> int:
        self._finish(None)
        return self.made

    async def ended(self) -> Ended[list[int]]:
        return await asyncio.shield(self._end)

    def step(self, now: int) -> None:
        if not self.alive or now <= self.born + self.script.delay:
            return
        self.made += 1
        self._take_state(now)
        if self.made < self.script.length:
            return
        if self.script.error is not None:
            self.fail(self.script.error)
        else:
            self._finish(None if self.script.lost else self.script.reason)

    def tell(self, now: int) -> None:
        """Let the probe hear what has come by now, whether the candidate runs or not."""
        while self.probe is not None and self._states and self._states[0][0] <= now:
            self.probe.tell(self._states.pop(0)[1])

    def _take_state(self, now: int) -> None:
        if self.probe is not None and self.made in self.probe.detect_at and self.script.hidden is not None:
            state = np.asarray(self.script.hidden(self.made), dtype=np.float32)
            self._states.append((now + self.script.lag, Probed(self.made, state)))

    def fail(self, error: Exception) -> None:
        if self.alive:
            self._end.set_exception(error)
            self._end.exception()  # it may be that nobody waits for it

    def _finish(self, reason: FinishReason | None) -> None:
        if self.alive:
            self._end.set_result(Ended(self.made, reason, list(range(self.made))))


class ScriptedEngine:
    """Implements :class:`darts_server.engine.port.Engine` for requests that are strings."""

    def __init__(self, script: Callable[[str, int], Script]) -> None:
        self.now = 0
        self.weight_version = 0
        self.capacity: int | None = None
        self.probe_width: int | None = None
        self.started: list[ScriptedCandidate] = []
        self.refuse: Exception | None = None
        """Raised by :meth:`start` while set."""
        self._script = script
        self._dead = False

    @property
    def running(self) -> list[ScriptedCandidate]:
        return [c for c in self.started if c.alive]

    @property
    def unfinished(self) -> int:
        return len(self.running)

    async def start(self, request: str, index: int, probe: Probe | None = None) -> ScriptedCandidate:
        if self._dead:
            raise EngineDead("the scripted engine was killed")
        if self.refuse is not None:
            raise self.refuse
        candidate = ScriptedCandidate(request, index, self._script(request, index), born=self.now, probe=probe)
        self.started.append(candidate)
        return candidate

    def cut(self, request: str, output: list[int], tokens: int) -> list[int]:
        return output[:tokens]

    def generated(self, output: list[int], start: int) -> Generated:
        return generated(output, start)

    def token_ids(self, request: str, output: list[int]) -> tuple[list[int], list[int]]:
        return list(map(ord, request)), output

    async def step(self) -> None:
        """One decode step of everything that runs, then time for the waiters to react."""
        self.now += 1
        for candidate in self.running:
            candidate.step(self.now)
        for candidate in self.started:
            candidate.tell(self.now)
        await settle()

    async def run(self, steps: int = 10_000) -> None:
        """Step until nothing runs.

        Raises:
            CandidateFailed: something still runs after ``steps`` steps.
        """
        await settle()
        for _ in range(steps):
            if not self.running:
                return
            await self.step()
        raise CandidateFailed(f"{len(self.running)} candidates still run after {steps} steps")

    def kill(self) -> None:
        """The engine dies: everything running fails, nothing starts any more."""
        self._dead = True
        for candidate in self.running:
            candidate.fail(EngineDead("the scripted engine was killed"))


def generated(output: list[int], start: int) -> Generated:
    """The script's tokens from ``start`` on."""
    return Generated(output[start:], [-token / 8 for token in output[start:]])


async def settle() -> None:
    """Let every task that is ready run."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
