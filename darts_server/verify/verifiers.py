"""All verifiers of the command line, as one `Verifier`."""

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from darts_server.exceptions import InvalidSetting
from darts_server.observers import Event
from darts_server.types import VerifierResult
from darts_server.verify.batcher import Batcher, Runner, RunnerFailed
from darts_server.verify.calls import Call
from darts_server.verify.channel import Task
from darts_server.verify.process import Process
from darts_server.verify.remote import Connection
from darts_server.verify.specs import REMOTE, Spec
from darts_server.verify.types import NO_VERDICT, Answer, Verdict

logger = logging.getLogger(__name__)

WAIT_TIMEOUTS = 20
"""Longest wait for a verdict, in times of a call: ten minutes with the default of 30 s. Meanwhile, a verifier of two
seconds a call gives 300 verdicts with each process."""
LARGEST_REWARD = 1e300
"""The difference of two rewards is a float, too."""
MIN_WAIT = 60.0
"""Seconds that an answer may wait in any case, because a restarted process may have to import torch."""


@dataclass(frozen=True, slots=True)
class VerifierLimits:
    """Limits of each verifier. ``processes``, or for a URL ``requests``, are its calls at the same time."""

    seconds: float = 30.0
    """Time of a call."""
    processes: int | None = None
    requests: int = 64
    memory: int = 4 << 30
    """Bytes of a process, 0 for no limit."""


class Verifiers:
    """Gives answers the weighted sum of their verifiers' rewards.

    An answer is correct if no verifier says that it is wrong. If no verifier says whether it is correct, it is correct
    with a reward above 0.

    Args:
        default: reward of a verifier that gives none. By default, the answer then has no reward.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        limits: VerifierLimits | None = None,
        default: float | None = None,
    ) -> None:
        self.called = Event[[str, VerifierResult, float]]()
        """A call has ended: the verifier's name, the result, and seconds including the wait for a process."""
        self._default = default
        self._specs = {spec.name: spec for spec in specs}
        limits = limits or VerifierLimits()
        wait_limit = max(WAIT_TIMEOUTS * limits.seconds, MIN_WAIT)
        self._batchers = {
            spec.name: Batcher(_create_runners(spec, limits), wait_limit, partial(self._report_call, spec.name))
            for spec in specs
        }
        self._logged_failures: set[tuple[str, VerifierResult, str]] = set()

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._specs)

    async def start(self) -> None:
        """Load the code of all verifiers, each in its first process. Call `close` also if this fails.

        Raises:
            InvalidSetting: the code of a verifier cannot be loaded.
        """
        for name, batcher in self._batchers.items():
            try:
                await batcher.start()
            except RunnerFailed as error:
                raise InvalidSetting(f"--verifier {self._specs[name].text}: {error}") from error

    async def close(self) -> None:
        """End all calls without a verdict, and all processes."""
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))

    async def verify(self, answer: Answer, names: Sequence[str] = ()) -> Verdict:
        chosen = tuple(dict.fromkeys(names)) or self.names
        if not chosen or not self._specs.keys() >= set(chosen):
            return NO_VERDICT
        futures = [self._batchers[name].submit(answer) for name in chosen]
        try:
            calls = [await future for future in futures]
        finally:
            # If the group is cancelled, its waiting answers are not called.
            for future in futures:
                future.cancel()

        total = 0.0
        says_correct = []
        for name, call in zip(chosen, calls, strict=True):
            reward = self._default if call.reward is None else call.reward
            if reward is None:
                return NO_VERDICT
            total += self._specs[name].weight * reward
            if call.correct is not None:
                says_correct.append(call.correct)
        # Also NaN, if one reward is infinite and another is minus infinity.
        if not abs(total) <= LARGEST_REWARD:
            return NO_VERDICT
        return Verdict(total, all(says_correct) if says_correct else total > 0)

    def _report_call(self, name: str, call: Call, seconds: float) -> None:
        self.called(name, call.result, seconds)
        if call.result is VerifierResult.REWARD:
            return
        # A timeout of the call and a timeout of the wait have different remedies. Other details vary without end.
        detail = call.detail if call.result is VerifierResult.TIMEOUT else ""
        failure = (name, call.result, detail)
        if failure not in self._logged_failures:
            self._logged_failures.add(failure)
            logger.warning(
                "the verifier %s gave no reward (%s): it %s; further answers like this are only counted, in "
                "darts_verifier_calls_total",
                name,
                call.result,
                call.detail,
            )


def _create_runners(spec: Spec, limits: VerifierLimits) -> list[Runner]:
    if spec.kind in REMOTE:
        client = httpx.AsyncClient(
            # `Connection` limits the time.
            timeout=None,
            limits=httpx.Limits(max_connections=limits.requests, max_keepalive_connections=limits.requests),
        )
        return [Connection(client, spec.kind, spec.target, limits.seconds) for _ in range(limits.requests)]
    # The engine and the server need cores too.
    processes = limits.processes or max(1, len(os.sched_getaffinity(0)) // 2)
    task = Task(spec.kind, spec.target, spec.function, limits.memory)
    return [Process(task, limits.seconds) for _ in range(processes)]
