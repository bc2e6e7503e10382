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
    """Allocates candidates over the groups that arrive within ``window`` seconds (as the DARTS paper does for a batch).

    The mean over all groups of one policy and size stays at the budget.

    Args:
        clock: monotonic seconds.
        rng: decides which cohorts explore.
        redundancy_scale: see `Rollouts.redundancy_scale`.
    """

    def __init__(
        self,
        statistics: Statistics,
        window: float,
        on_cohort_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        rng: np.random.Generator | None = None,
        redundancy_scale: Callable[[], float] = lambda: 1.0,
        gate_opening_number: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self._statistics = statistics
        self._shadow_prices = StoredValues(statistics.documents, PRICE)
        self.deadlines = Deadlines(statistics.documents, rng or np.random.default_rng())
        self.auto = Auto(statistics, gate_opening_number)
        self._window = window
        self._on_cohort_end = on_cohort_end
        self._clock = clock
        self._redundancy_scale = redundancy_scale
        # Prompt keys and futures by policy and size: groups of a cohort must be comparable.
        self._waiting: dict[str, list[tuple[str, asyncio.Future[Allocation]]]] = {}
        self._budget_remainders: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def allocate(self, plan: Plan, prompt_key: str) -> Allocation:
        """Most policies wait ``window`` seconds for other groups."""
        if not plan.shaping.uses_cohort:
            return Allocation(plan.candidates_without_statistics(self._redundancy_scale()))
        policy_and_size = _policy_and_size(plan)
        if policy_and_size not in self._waiting:
            self._waiting[policy_and_size] = []
            task = asyncio.create_task(self._allocate_after_window(policy_and_size, plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        allocated: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._waiting[policy_and_size].append((prompt_key, allocated))
        try:
            return await allocated
        except asyncio.CancelledError:
            # A group may be cancelled after its allocation, in the same turn. Its cohort must not wait.
            if allocated.done() and not allocated.cancelled() and allocated.exception() is None:
                allocated.result().drop()
            raise

    async def _allocate_after_window(self, policy_and_size: str, plan: Plan) -> None:
        await asyncio.sleep(self._window)
        waiting = []
        for prompt_key, allocated in self._waiting.pop(policy_and_size):
            if not allocated.cancelled():
                waiting.append((prompt_key, allocated))
        if not waiting:
            return
        try:
            allocations = self.allocate_cohort(plan, [prompt_key for prompt_key, _ in waiting])
        except Exception as error:
            for _, allocated in waiting:
                allocated.set_exception(error)
            return
        for (_, allocated), allocation in zip(waiting, allocations, strict=True):
            allocated.set_result(allocation)

    def run_probabilities(self, plan: Plan, prompt_keys: Sequence[str]) -> list[float]:
        """Return below 1 for prompts that are almost surely without signal."""
        lowest_probability = plan.shaping.skip_floor
        if lowest_probability is None or not plan.shaping.adapts_to_signal:
            return [1.0] * len(prompt_keys)
        probabilities = []
        # Chances that a group has both right and wrong answers.
        for chance in signal_chances(self._statistics.pass_rates.posteriors(prompt_keys), plan.size):
            probabilities.append(lowest_probability if chance < UNINFORMATIVE else 1.0)
        return probabilities

    def allocate_cohort(
        self,
        plan: Plan,
        prompt_keys: Sequence[str],
        budget: int | None = None,
        auto: AutoBatch | None = None,
        num_starting: int | None = None,
    ) -> list[Allocation]:
        """Allocate candidates to groups that make a cohort of their own.

        ``budget``: number of candidates in all. ``num_starting``: number of groups that start at once, or None for all.
        """
        num_groups = len(prompt_keys)
        if num_starting is None:
            num_starting = num_groups
        size = plan.size
        # A caller's budget is not reduced under load.
        scale = 1.0 if budget is not None else self._redundancy_scale()
        counts, mean_count = self._candidate_counts(plan, prompt_keys, budget)

        # A few groups say little about the tokens that groups need, so recent groups decide instead.
        is_small = num_starting < MIN_COHORT
        rule = self.deadlines.current_rule(plan.shaping, plan.policy)
        recent_deadline = None
        if rule is not None:
            recent_lengths = self.deadlines.load_recent_lengths(_policy_and_size(plan))
            if is_small:
                recent_deadline = recent_lengths.deadline(rule)
            else:
                # The quantile decides if too few groups of the cohort have a completion length.
                rule = replace(rule, recent=recent_lengths.quantile(rule))

        record = CohortRecord(
            policy=plan.policy,
            groups=num_groups,
            mean_candidates=size + (mean_count - size) * scale,
            explored=rule is not None and self.deadlines.choose_exploration(rule, plan.policy, num_groups),
            auto_choice=None if auto is None else auto.choice.reason,
        )

        def end_cohort(record: CohortRecord) -> None:
            self._on_cohort_end(record)
            if auto is None:
                return
            try:
                auto.learn(record)
            except Exception:
                # An error must not fail the last group, whose trajectories are not delivered yet.
                logger.exception("nothing was learned from a batch of %d groups under auto", num_groups)

        cohort = Cohort(
            record,
            rule,
            end_cohort,
            self._clock,
            num_starting,
            on_start=None if auto is None else auto.mark_started,
            initial_deadline=recent_deadline,
            is_small=is_small,
        )
        # Whether a prompt is saturated depends on the spread of its lengths, and not on the load.
        return [
            Allocation(reduce_candidates(count, size, scale), cohort, plan.shaping.is_saturated(size, count))
            for count in counts
        ]

    def _candidate_counts(
        self,
        plan: Plan,
        prompt_keys: Sequence[str],
        budget: int | None,
    ) -> tuple[Sequence[int], float]:
        """Return candidates per group before the load reduces them, and the mean that was aimed at."""
        shaping = plan.shaping
        num_groups = len(prompt_keys)
        low, high = shaping.candidate_limits(plan.size)
        length_stds: list[float | None] = [None] * num_groups
        if shaping.adaptive:
            length_stds = [self._load_length_std(prompt_key) for prompt_key in prompt_keys]

        if budget is not None:
            mean_count = budget / num_groups
        else:
            stats = DatasetStats()
            if shaping.budget is BudgetKind.CV_LOG:
                stats = self._statistics.dataset.stats
            mean_count = shaping.mean_candidates(plan.size, stats.std, stats.mean)
            policy_and_size = _policy_and_size(plan)
            # A few groups are not a sample of all prompts, so the price of earlier groups decides. `allocate` moves the
            # price towards a mean of `mean_count` over many groups.
            if shaping.adaptive and num_groups < MIN_COHORT:
                price = self._shadow_prices.load(policy_and_size) or ShadowPrice()
                counts = [price.allocate(std, mean_count, low, high) for std in length_stds]
                self._shadow_prices.save(policy_and_size, asdict(price))
                return counts, mean_count
            # Whole numbers whose mean over all cohorts is `mean_count`.
            remainder = self._budget_remainders.get(policy_and_size, 0.0)
            counts, self._budget_remainders[policy_and_size] = allocate_evenly(mean_count, num_groups, remainder)
            if not shaping.is_uneven:
                return counts, mean_count
            budget = sum(counts)

        if shaping.adapts_to_signal:
            posteriors = self._statistics.pass_rates.posteriors(prompt_keys)
            return allocate_by_signal(posteriors, budget, low, high), mean_count
        return allocate_by_std(
            length_stds,
            budget=budget,
            low=low,
            high=high,
        ), mean_count

    def _load_length_std(self, prompt_key: str) -> float | None:
        stats = self._statistics.prompts.load(prompt_key)
        return None if stats is None else stats.std_ema


def _policy_and_size(plan: Plan) -> str:
    return f"{plan.policy}/{plan.size}"
