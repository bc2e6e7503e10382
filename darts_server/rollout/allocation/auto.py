"""What `auto` does with each cohort: from what the server has learned, and corrected by how cohorts went."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from darts_server.engine.port import RequestTokens
from darts_server.policy.auto.chooser import (
    Choice,
    Measured,
    MeasuredResuming,
    begin,
    choose,
    choose_by_size,
    choose_resuming,
    hindsight,
    learn,
    learn_resuming,
    learn_training,
    needs_hindsight,
)
from darts_server.policy.auto.state import AutoState
from darts_server.policy.simulation.forecast import MAX_SAMPLES
from darts_server.records import CohortRecord, applied_policy
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import MIN_COHORT, Statistics, mean_prompt
from darts_server.rollout.plan import Plan

STATE = json_kind("auto", lambda value: AutoState(**value))
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
    measured. ``resumed``: cohorts whose prompts go on later and that have ended since the last such choice. Only
    ``running`` and ``most_samples`` outlive a restore of learned state: what is restored may be of another training
    run.
    """

    running: int = 0
    returned: float = 0.0
    idle_since: float | None = None
    most_samples: int = MAX_SAMPLES
    not_forecast: tuple[Choice, Sequence[str], Sequence[RequestTokens], int, Measured] | None = None
    resumed: list[tuple[Choice, MeasuredResuming]] = field(default_factory=list)


class AutoCohorts:
    """Choose what is done with cohorts, and learn from them by group size.

    ``clock``: monotonic seconds. ``opening``: see `Gate.opening`.
    """

    def __init__(
        self,
        statistics: Statistics,
        deadlines: Deadlines,
        clock: Callable[[], float],
        opening: Callable[[], int | None],
    ) -> None:
        self._statistics = statistics
        self._deadlines = deadlines
        self._states = StoredValues(statistics.documents, STATE)
        self._clock = clock
        self._opening = opening
        self._learning = asyncio.Lock()
        self._one_at_a_time = CapacityLimiter(1)  # several threads would take the interpreter from the event loop
        self._activities: defaultdict[int, _Activity] = defaultdict(_Activity)
        self._generation = statistics.documents.generation

    def state(self, size: int, resumes: bool = False) -> AutoState:
        """What was learned about groups of ``size``, in batches whose prompts go on later, or in others."""
        return self._states.load(f"{size} resumed" if resumes else str(size)) or AutoState()

    async def choose(
        self,
        plan: Plan,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens],
        enough: int | None = None,
        min_groups: int | None = None,
        resumes: bool = False,
        lost: int = 0,
    ) -> Choice | None:
        """Choose what is done with a cohort, in a thread: a forecast of a large batch takes half a second.

        ``None`` where its policy is another. ``keys``, ``tokens``: of its prompts and requests. ``enough``: complete
        groups with which it ends; ``None`` for all. ``min_groups``: with which it may end, in place of all.
        ``resumes``: whether prompts that are not decided go on later from what they have; no rule is chosen then, so
        that all go on under the same. ``lost``: see `choose_resuming`.
        """
        size = plan.size
        if plan.auto is None:
            return None
        if resumes:
            await self._learn_resumed(size)
            needed, offered = enough or min_groups or len(keys), len(keys)
            return choose_resuming(plan.auto, self.state(size, resumes=True), needed, offered, lost)
        if (choice := choose_by_size(plan.auto, size, len(keys))) is not None:
            return replace(choice, num_groups=enough)
        auto = plan.auto.with_deadlines(
            lambda shaping, option: self._deadlines.current_rule(shaping, applied_policy(plan.policy, option))
        )
        activity, learned = self._activities[size], self._statistics
        ended, activity.not_forecast = activity.not_forecast, None
        if ended is not None and choose_by_size(auto, size, len(ended[1])) is None:
            # Learn from that cohort by what would have been forecast of it with what is known now.
            generation, state = self._generation, self.state(size)
            rng = np.random.default_rng([SEED, state.batches, 1])
            earlier, its_keys, its_tokens, its_enough, measured = ended
            expectation = learned.expect(its_keys, its_tokens, state.means, rng, state.max_tokens)
            known = (size, expectation, learned.latency.machine(), its_enough, rng)
            earlier = await run_sync(hindsight, earlier, *known, limiter=self._one_at_a_time)
            if self._forget_replaced() == generation:
                self._save(size, learn(self.state(size), earlier, replace(measured, means=())))
        state, machine = self.state(size), learned.latency.machine()
        rng = np.random.default_rng([SEED, state.batches])
        expectation = learned.expect(keys, tokens, state.means, rng, state.max_tokens)

        def choose_in_time() -> Choice:
            """Choose with as many samples as there is time for, by how long these have taken."""
            most, began = activity.most_samples, self._clock()
            choice = choose(auto, state, size, expectation, machine, enough or len(keys), rng, most, min_groups)
            taken = self._clock() - began
            if expectation is not None and choice.forecast is not None and taken > 0:
                possible = FORECAST_SHARE * choice.off_seconds * expectation.samples(most) / taken
                activity.most_samples = int(min(max(possible, 1), MAX_SAMPLES))
            return choice

        choice = await run_sync(choose_in_time, limiter=self._one_at_a_time)
        return replace(choice, num_groups=enough if choice.enough is None else choice.enough)

    def follow(
        self,
        plan: Plan,
        keys: Sequence[str],
        tokens: Sequence[RequestTokens],
        choice: Choice,
        record: CohortRecord,
        planned: int | None,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what must be called when a cohort's first group starts, and when the last has ended, to learn from it.

        ``keys``, ``tokens``: of its prompts and requests. ``planned``: candidates with which it runs as it was
        forecast; ``None`` where it does not.
        """
        auto, size, activity = plan.auto, plan.size, self._activities[plan.size]
        assert auto is not None
        resumes = choice.begun is not None
        learns = auto.forecasts and not resumes and len(keys) >= MIN_COHORT
        generation: int | None = None  # of learned state when it started
        opening: int | None = None

        def start() -> None:
            nonlocal generation, opening
            opening, generation = self._opening(), self._forget_replaced()
            if not learns:
                return
            state = self.state(size)
            if not activity.running:
                if activity.idle_since is not None:
                    state = learn_training(state, activity.returned, self._clock() - activity.idle_since)
                activity.returned, activity.idle_since = 0.0, None
            activity.running += 1
            self._save(size, begin(state, replace(choice, explores=choice.explores or record.explored)))

        def end() -> None:
            enough = choice.num_groups or record.groups
            is_complete = record.completed >= enough
            # While the gate is closed, the engines are paused or run empty.
            was_open = opening is not None and self._opening() == opening
            is_current = generation == self._forget_replaced()
            if resumes and is_current:
                found = MeasuredResuming(
                    record.returned_lengths,
                    mean_prompt(tokens),
                    record.stale_tokens,
                    record.new_tokens,
                    record.measured_seconds if is_complete and was_open else 0.0,
                )
                activity.resumed.append((choice, found))
            if not learns or generation is None:
                return
            activity.running -= 1
            if not is_current:  # learned state was restored meanwhile
                return
            activity.returned += record.returned_tokens
            if not activity.running and is_complete:  # nothing is trained with what was cancelled
                activity.idle_since = self._clock()
            # Where too few are admitted, groups get fewer candidates than they were allocated.
            is_full = planned is not None and (choice.num_groups is not None or record.candidates >= planned)
            if not (is_complete and is_full and was_open) or record.reduced or record.interrupted:
                return
            stats, returned = [self._statistics.prompts.load(key) for key in keys], max(record.returned, 1)
            measured = Measured(
                record.measured_seconds,
                record.returned_tokens / returned,
                record.cut / returned,
                record.max_tokens,
                record.longest,
                [one.mean_ema for one in stats if one is not None],
                record.truncated / returned,
            )
            state = learn(self.state(size), choice, measured)
            if needs_hindsight(state, choice):
                activity.not_forecast = choice, keys, tokens, enough, measured
            self._save(size, state)

        return start, end

    async def _learn_resumed(self, size: int) -> None:
        """Learn from the cohorts that have ended since the last choice for one whose prompts go on later."""
        async with self._learning:
            generation, activity = self._forget_replaced(), self._activities[size]
            machine = self._statistics.latency.machine()
            while activity.resumed:
                known = (self.state(size, resumes=True), *activity.resumed.pop(0), machine)
                state = await run_sync(learn_resuming, *known, limiter=self._one_at_a_time)
                if self._forget_replaced() == generation:
                    self._save(size, state, resumes=True)

    def _forget_replaced(self) -> int:
        """Forget what is in memory alone if learned state was restored; return how often it was."""
        if self._generation != (generation := self._statistics.documents.generation):
            self._generation = generation
            for activity in self._activities.values():
                activity.returned, activity.idle_since, activity.not_forecast = 0.0, None, None
                activity.resumed = []
        return generation

    def _save(self, size: int, state: AutoState, resumes: bool = False) -> None:
        self._states.save(f"{size} resumed" if resumes else str(size), asdict(state))
