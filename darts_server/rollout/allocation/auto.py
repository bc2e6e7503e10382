"""What `auto` does with each cohort: from what the server has learned, and corrected by how cohorts went."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from darts_server.policy.auto.chooser import Choice, Measured, begin, choose, learn, learn_training
from darts_server.policy.auto.forecast import Expectation
from darts_server.policy.auto.options import Auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.simulation.machine import Machine, StepTime
from darts_server.rollout.learned.documents import Parse, StoredValues
from darts_server.rollout.learned.statistics import Statistics
from darts_server.types import CohortRecord

KIND = "auto"
PARSERS: dict[str, Parse] = {KIND: lambda value: AutoState(**value)}
"""How values are parsed, by kind."""
RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean: the longest of a batch is one in thousands."""
SEED = 0
UNLIMITED = 1 << 20
"""Sequences that an engine without a limit runs at once."""


class AutoCohorts:
    """Choose what is done with cohorts, and learn from them by group size.

    ``clock``: monotonic seconds.
    """

    def __init__(self, statistics: Statistics, clock: Callable[[], float]) -> None:
        self._statistics = statistics
        self._states = StoredValues(statistics.documents, KIND, PARSERS[KIND])
        self._clock = clock
        self._running = 0
        self._returned = 0.0
        self._idle_since: float | None = None

    def state(self, size: int) -> AutoState:
        """What was learned about groups of ``size``."""
        state: AutoState | None = self._states.load(str(size))
        return state or AutoState()

    async def choose(self, auto: Auto, size: int, keys: Sequence[str], enough: int | None) -> Choice:
        """Choose what is done with a cohort, in a thread: a forecast of a large batch takes half a second."""
        state, machine = self.state(size), self._machine()
        rng = np.random.default_rng([SEED, state.batches])
        prompts = self._statistics.prompts
        means, stds = [prompts.mean(key) for key in keys], [prompts.std(key) for key in keys]
        ratios = self._statistics.dataset.profile.quantiles(RATIOS)
        expectation = Expectation.of(means, stds, ratios, state, rng)
        return await asyncio.to_thread(choose, auto, state, size, expectation, machine, enough or len(keys), rng)

    def start(self, size: int, choice: Choice, *, explores: bool, counts: bool) -> None:
        """Record that a cohort starts.

        ``explores``: whether it runs past its deadline. ``counts``: whether it is a batch, and not a few groups alone.
        """
        state = self.state(size)
        if not self._running and self._idle_since is not None:
            state = learn_training(state, self._returned, self._clock() - self._idle_since)
        if not self._running:
            self._returned = 0.0
        self._running += 1
        if counts:
            self._save(size, begin(state, replace(choice, explores=choice.explores or explores)))

    def end(
        self, size: int, keys: Sequence[str], choice: Choice, record: CohortRecord, enough: int | None, *, counts: bool
    ) -> None:
        """Learn from a cohort that has ended. ``counts``: whether it ran as it was forecast."""
        self._running -= 1
        self._returned += record.returned_tokens
        self._idle_since = None if self._running else self._clock()
        if not counts or record.interrupted or record.completed < (enough or record.groups):
            return
        means = [self._statistics.prompts.mean(key) for key in keys]
        measured = Measured(
            record.measured_seconds,
            record.returned_tokens,
            record.returned_tokens / max(record.returned, 1),
            record.cut / max(record.returned, 1),
            record.max_tokens,
            record.longest,
            [mean for mean in means if mean is not None],
        )
        self._save(size, learn(self.state(size), choice, measured))

    def _save(self, size: int, state: AutoState) -> None:
        self._states.save(str(size), asdict(state))

    def _machine(self) -> Machine | None:
        latency = self._statistics.latency
        if latency.curve is None:
            return None
        blocks: dict[str, Any] = {}
        if latency.kv_tokens is not None:
            blocks = {"kv_blocks": latency.kv_tokens, "block_size": 1}
        return Machine(StepTime(latency.curve), max_num_seqs=latency.capacity or UNLIMITED, **blocks)
