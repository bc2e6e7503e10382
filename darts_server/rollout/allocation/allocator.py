"""Allocate candidates to groups, from statistics of their prompts and of the groups that start together."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from darts_server.estimates.lengths import DatasetStats
from darts_server.policy.allocation import (
    ShadowPrice,
    allocate_by_std,
    allocate_evenly,
    reduce_candidates,
)
from darts_server.policy.shaping import BudgetKind
from darts_server.policy.signal import UNINFORMATIVE, allocate_by_signal, signal_chances
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.auto import Auto, AutoBatch
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import MIN_COHORT, Statistics
from darts_server.rollout.plan import Plan

logger = logging.getLogger(__name__)

PRICE = json_kind("price", ShadowPrice)


class Allocator:
    """Allocate candidates over the groups that arrive within ``window`` seconds (as the DARTS paper does for a batch).

    The mean over all groups of one policy and size stays at the budget.

    Args:
        on_cohort_end: called with the record of each cohort that has ended.
        clock: monotonic seconds.
        rng: decides which cohorts explore.
        scale: returns the share of the redundancy that the load leaves room for, 0 to 1.
        opening: see `Gate.opening`.
    """

    def __init__(
        self,
        statistics: Statistics,
        window: float,
        on_cohort_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        rng: np.random.Generator | None = None,
        scale: Callable[[], float] = lambda: 1.0,
        opening: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self._statistics = statistics
        self._prices = StoredValues(statistics.documents, PRICE)
        self.deadlines = Deadlines(statistics.documents, rng or np.random.default_rng())
        self.auto = Auto(statistics, opening)
        self._window = window
        self._on_cohort_end = on_cohort_end
        self._clock = clock
        self._scale = scale
        # Prompt keys and results of waiting groups, by policy and size: groups of a cohort must be comparable.
        self._waiting: dict[str, list[tuple[str, asyncio.Future[Allocation]]]] = {}
        self._remainders: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def allocate(self, plan: Plan, prompt_key: str) -> Allocation:
        """Allocate candidates to one group. Most policies wait ``window`` seconds for other groups."""
        if not plan.shaping.uses_cohort:
            return Allocation(plan.candidates_without_statistics(self._scale()))
        name = _policy_and_size(plan)
        if name not in self._waiting:
            self._waiting[name] = []
            task = asyncio.create_task(self._allocate_waiting(name, plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        result: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._waiting[name].append((prompt_key, result))
        try:
            return await result
        except asyncio.CancelledError:
            # A group may be cancelled after its allocation, in the same turn. Its cohort must not wait for it.
            if result.done() and not result.cancelled() and result.exception() is None:
                result.result().drop()
            raise

    async def _allocate_waiting(self, name: str, plan: Plan) -> None:
        """Answer all calls of `allocate` at the end of the window."""
        await asyncio.sleep(self._window)
        waiting = [(key, result) for key, result in self._waiting.pop(name) if not result.cancelled()]
        if not waiting:
            return
        try:
            allocations = self.allocate_cohort(plan, [key for key, _ in waiting])
        except Exception as error:
            for _, result in waiting:
                result.set_exception(error)
            return
        for (_, result), allocation in zip(waiting, allocations, strict=True):
            result.set_result(allocation)

    def run_probabilities(self, plan: Plan, prompt_keys: Sequence[str]) -> list[float]:
        """Return the probability with which a batch runs each prompt: below 1 if it is almost surely without signal."""
        floor = plan.shaping.skip_floor
        if floor is None or not plan.shaping.adapts_to_signal:
            return [1.0] * len(prompt_keys)
        chances = signal_chances(self._statistics.pass_rates.posteriors(prompt_keys), plan.size)
        probabilities = []
        for chance in chances:
            probabilities.append(floor if chance < UNINFORMATIVE else 1.0)
        return probabilities

    def allocate_cohort(
        self,
        plan: Plan,
        prompt_keys: Sequence[str],
        budget: int | None = None,
        auto: AutoBatch | None = None,
        starting: int | None = None,
    ) -> list[Allocation]:
        """Allocate candidates to groups that make a cohort of their own.

        ``budget``: number of candidates in all. ``auto``: the batch whose number of prompts `auto` has chosen.
        ``starting``: number of groups that start at once, or None for all.
        """
        groups = len(prompt_keys)
        if starting is None:
            starting = groups
        size = plan.size
        scale = 1.0 if budget is not None else self._scale()
        counts, mean = self._counts(plan, prompt_keys, budget)

        # A few groups say little about the tokens that groups need. Recent groups decide instead.
        is_small = starting < MIN_COHORT
        rule = self.deadlines.current_rule(plan.shaping, plan.policy)
        tokens_from_recent = None
        if rule is not None:
            recent = self.deadlines.recent_lengths(_policy_and_size(plan))
            if is_small:
                tokens_from_recent = recent.deadline(rule)
            else:
                rule = replace(rule, recent=recent.quantile(rule))

        record = CohortRecord(
            policy=plan.policy,
            groups=groups,
            mean_candidates=size + (mean - size) * scale,
            explored=rule is not None and self.deadlines.choose_exploration(rule, plan.policy, groups),
            auto_choice=None if auto is None else auto.choice.reason,
        )

        def end(record: CohortRecord) -> None:
            self._on_cohort_end(record)
            if auto is None:
                return
            try:
                auto.end(record)
            except Exception:
                # An error must not fail the group that ends last: its trajectories are not delivered yet.
                logger.exception("nothing was learned from a batch of %d groups under auto", groups)

        on_start = None
        if auto is not None:
            on_start = auto.start
        cohort = Cohort(
            record,
            rule,
            end,
            self._clock,
            starting,
            on_start,
            tokens=tokens_from_recent,
            few=is_small,
        )
        # Whether a prompt is saturated depends on the spread of its lengths, and not on the load.
        return [
            Allocation(reduce_candidates(count, size, scale), cohort, plan.shaping.is_saturated(size, count))
            for count in counts
        ]

    def _counts(self, plan: Plan, prompt_keys: Sequence[str], budget: int | None) -> tuple[Sequence[int], float]:
        """Return the number of candidates of each group before the load reduces it, and the mean M' over all groups.

        ``budget``: number of candidates in all, or None for the policy's mean.
        """
        shaping = plan.shaping
        groups = len(prompt_keys)
        low, high = shaping.bounds(plan.size)
        # Without statistics all prompts are equal, and share the budget evenly.
        stds: list[float | None] = [None] * groups
        if shaping.adaptive:
            stds = [self._load_std(key) for key in prompt_keys]

        if budget is not None:
            mean = budget / groups
        else:
            stats = DatasetStats()
            if shaping.budget is BudgetKind.CV_LOG:
                stats = self._statistics.dataset.stats
            mean = shaping.mean_candidates(plan.size, stats.std, stats.mean)
            name = _policy_and_size(plan)
            if shaping.adaptive and groups < MIN_COHORT:
                price = self._prices.load(name) or ShadowPrice()
                counts = [price.allocate(std, mean, low, high) for std in stds]
                self._prices.save(name, asdict(price))
                return counts, mean
            # Whole numbers whose mean over all cohorts is M'.
            counts, self._remainders[name] = allocate_evenly(mean, groups, self._remainders.get(name, 0.0))
            if not shaping.is_uneven:
                return counts, mean
            budget = sum(counts)

        if shaping.adapts_to_signal:
            posteriors = self._statistics.pass_rates.posteriors(prompt_keys)
            return allocate_by_signal(posteriors, budget, low, high), mean
        return allocate_by_std(stds, budget=budget, low=low, high=high), mean

    def _load_std(self, prompt_key: str) -> float | None:
        stats = self._statistics.prompts.load(prompt_key)
        return None if stats is None else stats.std_ema


def _policy_and_size(plan: Plan) -> str:
    return f"{plan.policy}/{plan.size}"
