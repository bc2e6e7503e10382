"""An engine that follows a script and has its own clock, for tests of the rooms above it.

Usage::

    engine = ScriptedEngine(lambda request, index: Script(length=10 + index))
    running = await engine.start("prompt", 0)
    await engine.run()               # until nothing runs
    (await running.result()).tokens  # 10
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from darts_server.engine.port import NO_TOKENS, CandidateResult, HiddenState, Probe, TokenSlice
from darts_server.exceptions import CandidateFailed, EngineDead
from darts_server.types import FinishReason

# Turns of the event loop between two steps: enough for every waiting task to run, and to start or stop candidates.
SETTLE_TURNS = 12


@dataclass(frozen=True, slots=True)
class Script:
    """The course of one candidate: it waits ``delay`` steps, then generates one token a step.

    At ``length`` tokens it finishes with ``finish_reason``; if ``error`` is set it raises that instead, if ``aborted``
    the engine aborts it. ``hidden`` returns the hidden state at a number of tokens; its probe gets it ``lag`` steps
    later.
    """

    length: int
    delay: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    error: Exception | None = None
    aborted: bool = False
    hidden: Callable[[int], Sequence[float]] | None = None
    lag: int = 0


@dataclass(slots=True)
class ScriptedCandidate:
    """A candidate whose output is the list of its token ids, ``[0, 1, 2, …]``, with log-probs 0, -1/8, -2/8, ….

    ``started_at``: the engine's step at its start, or later when it got a slot. ``stop_lag``: turns of the event loop
    from `stop` to the result. ``order``: the lowest order gets a slot first.
    """

    request: str
    index: int
    script: Script
    started_at: int
    generated: int = 0
    probe: Probe | None = None
    stop_lag: int = 0
    order: float = 0.0
    has_slot: bool = True
    stopped: bool = False
    result_was_taken: bool = False
    pending_states: list[tuple[int, HiddenState]] = field(default_factory=list)
    """Hidden states that the probe has not received, each with the step of its arrival."""
    _result: asyncio.Future[CandidateResult[list[int]]] = field(default_factory=asyncio.Future)

    @property
    def is_running(self) -> bool:
        return not self._result.done()

    def count_tokens(self) -> int | None:
        return self.generated if self.is_running else None

    def tokens_from(self, start: int) -> TokenSlice | None:
        return slice_from(self.output(), start) if self.is_running else None

    def stop(self) -> int:
        """Abort the candidate in ``stop_lag`` turns of the event loop, and return its number of tokens."""
        assert not self.stopped, f"candidate {self.index} of {self.request!r} was stopped twice"
        self.stopped = True

        def abort_after(turns: int) -> None:
            if turns:
                asyncio.get_running_loop().call_soon(abort_after, turns - 1)
            else:
                self._finish(None)

        abort_after(self.stop_lag)
        # vLLM's candidate cannot count an output that was taken.
        return 0 if self.result_was_taken else self.generated

    async def result(self) -> CandidateResult[list[int]]:
        result = await asyncio.shield(self._result)
        self.result_was_taken = True
        return result

    def step(self, now: int) -> None:
        """Generate one token, unless the candidate waits or has finished."""
        if not self.is_running or not self.has_slot or now <= self.started_at + self.script.delay:
            return
        self.generated += 1
        if self.probe is not None and self.generated in self.probe.detect_at and self.script.hidden is not None:
            vector = np.asarray(self.script.hidden(self.generated), dtype=np.float32)
            arrives_at = now + self.script.lag
            self.pending_states.append((arrives_at, HiddenState(self.generated, vector)))
        if self.generated < self.script.length:
            return
        if self.script.error is not None:
            self.fail(self.script.error)
        else:
            self._finish(None if self.script.aborted else self.script.finish_reason)

    def fail(self, error: Exception) -> None:
        if self.is_running:
            self._result.set_exception(error)
            # asyncio would log an exception that no task retrieves.
            self._result.exception()

    def abort_as_lost(self, tokens: int = 0) -> None:
        """Abort the candidate as if its engine was lost after it had sent the first ``tokens`` tokens."""
        self.generated = min(self.generated, tokens)
        self._finish(None)

    def output(self) -> list[int]:
        return list(range(self.generated))

    def _finish(self, reason: FinishReason | None) -> None:
        """Set the result. ``reason``: None if the candidate was aborted."""
        if self.is_running:
            self._result.set_result(CandidateResult(self.generated, reason, self.output()))


class ScriptedEngine:
    """Implements :class:`darts_server.engine.port.Engine` for requests that are strings."""

    candidate_type = ScriptedCandidate

    def __init__(self, script: Callable[[str, int], Script]) -> None:
        self.now = 0
        self.weight_version = 0
        # Only reported: `slots` limits what runs.
        self.capacity: int | None = None
        self.slots: int | None = None
        """Maximum number of candidates that run, ``None`` if unlimited."""
        self.has_priorities = False
        self.drafts_from_siblings = False
        self.num_engines = 1
        self.probe_width: int | None = None
        self.started: list[ScriptedCandidate] = []
        self.start_error: Exception | None = None
        """Raised by :meth:`start` while set."""
        self.stop_lag = 0
        """``stop_lag`` of candidates that start from now on."""
        self._script = script
        self._is_killed = False

    @property
    def running(self) -> list[ScriptedCandidate]:
        return [candidate for candidate in self.started if candidate.is_running]

    @property
    def unfinished_requests(self) -> int:
        return len(self.running)

    async def start(
        self,
        request: str,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> ScriptedCandidate:
        if self._is_killed:
            raise EngineDead("the scripted engine was killed")
        if self.start_error is not None:
            raise self.start_error
        candidate = self.candidate_type(
            request,
            index,
            self._script(request, index),
            self.now,
            generated=len(prefix.token_ids),
            probe=probe,
            stop_lag=self.stop_lag,
            order=order,
            has_slot=self.slots is None,
        )
        self.started.append(candidate)
        return candidate

    def check_resumable(self, request: str) -> None:
        """Accept everything."""

    def truncate(self, request: str, output: list[int], tokens: int) -> list[int]:
        return output[:tokens]

    def aborted_output(self, request: str, prefix: TokenSlice = NO_TOKENS) -> list[int]:
        return list(prefix.token_ids)

    def finished_output(
        self,
        request: str,
        tokens: TokenSlice,
        finish_reason: FinishReason,
        text: str,
    ) -> list[int]:
        return list(tokens.token_ids)

    def tokens_from(self, output: list[int], start: int) -> TokenSlice:
        return slice_from(output, start)

    def token_ids(self, request: str, output: list[int]) -> tuple[list[int], list[int]]:
        return list(map(ord, request)), output

    async def step(self) -> None:
        """Run one decode step of all running candidates, then let the waiting tasks react."""
        waiting = [candidate for candidate in self.running if not candidate.has_slot]
        if self.has_priorities:
            waiting.sort(key=lambda candidate: candidate.order)
        if self.slots is not None:
            # `running` includes waiting candidates.
            free_slots = self.slots - len(self.running) + len(waiting)
            for candidate in waiting[:free_slots]:
                candidate.has_slot = True
                candidate.started_at = self.now

        self.now += 1
        for candidate in self.running:
            candidate.step(self.now)
        # Pass on the hidden states that arrive now. The last states of a candidate may arrive after its end.
        for candidate in self.started:
            pending = candidate.pending_states
            while candidate.probe is not None and pending and pending[0][0] <= self.now:
                candidate.probe.on_state(pending.pop(0)[1])
        await settle()

    async def run(self, steps: int = 10_000) -> None:
        """Step until nothing runs.

        Raises:
            CandidateFailed: candidates still run after ``steps`` steps.
        """
        await settle()
        for _ in range(steps):
            if not self.running:
                return
            await self.step()
        raise CandidateFailed(f"{len(self.running)} candidates still run after {steps} steps")

    def kill(self) -> None:
        self._is_killed = True
        for candidate in self.running:
            candidate.fail(EngineDead("the scripted engine was killed"))


def slice_from(output: list[int], start: int) -> TokenSlice:
    return TokenSlice(output[start:], [-token / 8 for token in output[start:]])


async def settle() -> None:
    # Each turn of the event loop runs the tasks that the turn before has woken.
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
