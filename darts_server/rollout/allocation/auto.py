"""What `auto` does with each cohort: from what the server has learned, and corrected by how cohorts went."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from darts_server.engine.port import RequestTokens
from darts_server.policy.auto.chooser import (
    Choice,
    Measured,
    begin,
    choose,
    choose_by_size,
    hindsight,
    learn,
    learn_training,
    needs_hindsight,
    next_ahead,
)
from darts_server.policy.auto.options import Auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.simulation.forecast import MAX_SAMPLES, RATIOS
from darts_server.records import CohortRecord
from darts_server.rollout.learned.documents import Parse, Restores, StoredValues
from darts_server.rollout.learned.statistics import Statistics

KIND = "auto"
PARSERS: dict[str, Parse] = {KIND: lambda value: AutoState(**value)}
"""How values are parsed, by kind."""
SEED = 0
FORECAST_SHARE = 0.01
"""Of a step's time, what forecasts may take, since the engine waits for them. Where they take longer, a batch is
sampled less often, but once. Eight samples of 16 groups for 18 options took 0.6 s beside other load."""


@dataclass(slots=True)
class _Activity:
    """Cohorts of one group size: how many run, and what they returned since none ran.

    ``idle_since``: when the last one ended; ``None`` while one runs, and where the time from then on is no training.
    ``most_samples``: of a batch, for which forecasts have time. ``not_forecast``: the last cohort that has ended
    without a forecast: its choice, the keys of its prompts, their tokens, with how many groups it ended, and what was
    measured. Only ``running`` and ``most_samples`` outlive a restore of learned state: what is restored may be of
    another training run.
    """

    running: int = 0
    returned: float = 0.0
    idle_since: float | None = None
    most_samples: int = MAX_SAMPLES
    not_forecast: tuple[Choice, Sequence[str], Sequence[RequestTokens], int, Measured] | None = None


class AutoCohorts:
    """Choose what is done with cohorts, and learn from them by group size.

    ``clock``: monotonic seconds.
    """

    def __init__(self, statistics: Statistics, clock: Callable[[], float]) -> None:
        self._statistics = statistics
        self._states = StoredValues(statistics.documents, KIND, PARSERS[KIND])
        self._clock = clock
        self._one_at_a_time = CapacityLimiter(1)  # several threads would take the interpreter from the event loop
        self._activities: defaultdict[int, _Activity] = defaultdict(_Activity)
        self._restores = Restores(statistics.documents)

    def state(self, size: int) -> AutoState:
        """What was learned about groups of ``size``."""
        state: AutoState | None = self._states.load(str(size))
        return state or AutoState()

    async def choose(
        self,
        auto: Auto,
        size: int,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens],
        enough: int | None,
        min_groups: int | None = None,
    ) -> Choice:
        """Choose what is done with a cohort, in a thread: a forecast of a large batch takes half a second.

        ``keys``, ``tokens``: of its prompts and requests. ``enough``: complete groups with which it ends; ``None`` for
        all. ``min_groups``: with which it may end, in place of all.
        """
        if (choice := choose_by_size(auto, size, len(keys))) is not None:
            return choice
        activity, learned = self._activities[size], self._statistics
        ended, activity.not_forecast = activity.not_forecast, None
        if ended is not None and choose_by_size(auto, size, len(ended[1])) is None:
            # Learn from that cohort by what would have been forecast of it with what is known now.
            restores, state = self._restores.count, self.state(size)
            rng = np.random.default_rng([SEED, state.batches, 1])
            earlier, its_keys, its_tokens, its_enough, measured = ended
            expectation = learned.expect(its_keys, its_tokens, state.means, RATIOS, rng, state.max_tokens)
            known = (size, expectation, learned.latency.machine(), its_enough, rng)
            earlier = await run_sync(hindsight, earlier, *known, limiter=self._one_at_a_time)
            if self._forget_replaced() == restores:
                self._save(size, learn(self.state(size), earlier, replace(measured, means=())))
        state, machine = self.state(size), learned.latency.machine()
        rng = np.random.default_rng([SEED, state.batches])
        expectation = learned.expect(keys, tokens, state.means, RATIOS, rng, state.max_tokens)

        def choose_in_time() -> Choice:
            """Choose with as many samples as there is time for, by how long these have taken."""
            most, began = activity.most_samples, self._clock()
            choice = choose(auto, state, size, expectation, machine, enough or len(keys), rng, most, min_groups)
            taken = self._clock() - began
            if expectation is not None and choice.forecast is not None and taken > 0:
                possible = FORECAST_SHARE * choice.off_seconds * expectation.samples(most) / taken
                activity.most_samples = int(min(max(possible, 1), MAX_SAMPLES))
            return choice

        return await run_sync(choose_in_time, limiter=self._one_at_a_time)

    def learn_stale(self, size: int, record: CohortRecord, most_stale: float) -> None:
        """Learn from a batch whose other prompts go on later how many to start of the next one."""
        if record.returned_tokens:
            state = self.state(size)
            ahead = next_ahead(state.ahead, record.stale_tokens / record.returned_tokens, most_stale)
            self._save(size, replace(state, ahead=ahead))

    def start(self, size: int, choice: Choice, *, explores: bool) -> int:
        """Record that the first group of a cohort starts; return what `end` needs.

        ``explores``: whether it runs past its deadline.
        """
        generation = self._forget_replaced()
        state, activity = self.state(size), self._activities[size]
        if not activity.running:
            if activity.idle_since is not None:
                state = learn_training(state, activity.returned, self._clock() - activity.idle_since)
            activity.returned, activity.idle_since = 0.0, None
        activity.running += 1
        self._save(size, begin(state, replace(choice, explores=choice.explores or explores)))
        return generation

    def end(
        self,
        size: int,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens],
        choice: Choice,
        record: CohortRecord,
        started: int,
        *,
        counts: bool,
    ) -> None:
        """Learn from a cohort that has ended, unless learned state was restored meanwhile.

        ``keys``, ``tokens``: of its prompts and requests. ``started``: what `start` returned. ``counts``: whether it
        ran as it was forecast.
        """
        is_current = started == self._forget_replaced()
        activity, enough = self._activities[size], choice.num_groups or record.groups
        is_complete = record.completed >= enough
        activity.running -= 1
        if not is_current:
            return
        activity.returned += record.returned_tokens
        if not activity.running and is_complete:  # nothing is trained with what was cancelled
            activity.idle_since = self._clock()
        if not (counts and is_complete) or record.interrupted:
            return
        means, returned = [self._statistics.prompts.mean(key) for key in keys], max(record.returned, 1)
        measured = Measured(
            record.measured_seconds,
            record.returned_tokens / returned,
            record.cut / returned,
            record.max_tokens,
            record.longest,
            [mean for mean in means if mean is not None],
            record.truncated / returned,
        )
        state = learn(self.state(size), choice, measured)
        if needs_hindsight(state, choice):
            activity.not_forecast = choice, keys, tokens, enough, measured
        self._save(size, state)

    def _forget_replaced(self) -> int:
        """Forget what is in memory alone if learned state was restored; return how often it was."""
        if self._restores.noticed():
            for activity in self._activities.values():
                activity.returned, activity.idle_since, activity.not_forecast = 0.0, None, None
        return self._restores.count

    def _save(self, size: int, state: AutoState) -> None:
        self._states.save(str(size), asdict(state))
