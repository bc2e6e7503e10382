"""Allocate candidates to groups, from the statistics of their prompts and of the groups that start with them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from darts_server.estimates.lengths import DatasetStats
from darts_server.policy.allocation import (
    ShadowPrice,
    allocate_by_std,
    allocate_evenly,
    reduce_candidates,
)
from darts_server.policy.shaping import BudgetKind
from darts_server.records import CohortRecord
from darts_server.rollout.allocation.auto import Auto, AutoBatch
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import MIN_COHORT, Statistics
from darts_server.rollout.plan import Plan

logger = logging.getLogger(__name__)

PRICE = json_kind("price", ShadowPrice)


@dataclass(slots=True)
class _WaitingGroup:
    prompt_key: str
    allocation: asyncio.Future[Allocation]


class Allocator:
    """Allocate candidates over the groups that arrive within ``window`` seconds (DARTS, section 2b in PAPERS.md).

    The mean over all groups of one policy and size stays at the budget. What it learns is kept with ``statistics``.

    Args:
        statistics: of prompts, data set and engine.
        window: seconds within which groups are allocated together.
        on_cohort_end: called with the record of each cohort that has ended.
        clock: monotonic seconds.
        rng: decides which cohorts explore; ``None`` for a fresh one.
        scale: share of the redundancy that there is room for now, 0 to 1; requested budgets are not scaled.
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
        # By policy and group size: groups that are allocated together must be comparable.
        self._waiting: dict[str, list[_WaitingGroup]] = {}
        self._remainders: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def allocate(self, plan: Plan, prompt_key: str) -> Allocation:
        """Allocate candidates to one group, at least its size. Most policies wait ``window`` seconds for others."""
        if not plan.shaping.uses_cohort:
            return Allocation(plan.candidates(self._scale()))
        name = f"{plan.policy}/{plan.size}"
        if name not in self._waiting:
            self._waiting[name] = []
            task = asyncio.create_task(self._allocate_waiting(name, plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        allocation: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._waiting[name].append(_WaitingGroup(prompt_key, allocation))
        try:
            return await allocation
        except asyncio.CancelledError:
            if allocation.done() and not allocation.cancelled() and allocation.exception() is None:
                allocation.result().drop()
            raise

    async def _allocate_waiting(self, name: str, plan: Plan) -> None:
        """Allocate candidates to all groups that have come within the window, and still wait."""
        await asyncio.sleep(self._window)
        groups = self._waiting.pop(name)
        try:
            groups = [group for group in groups if not group.allocation.cancelled()]
            keys = [group.prompt_key for group in groups]
            allocations = self.allocate_cohort(plan, keys) if groups else []
        except Exception as error:  # raised in every caller that waits
            for group in groups:
                if not group.allocation.cancelled():
                    group.allocation.set_exception(error)
            return
        for group, allocation in zip(groups, allocations, strict=True):
            group.allocation.set_result(allocation)

    def allocate_cohort(
        self,
        plan: Plan,
        prompt_keys: Sequence[str],
        budget: int | None = None,
        auto: AutoBatch | None = None,
    ) -> list[Allocation]:
        """Allocate candidates to groups that make a cohort of their own.

        ``budget``: candidates in all. ``auto``: what `auto` has chosen for their batch.
        """
        groups = len(prompt_keys)
        size = plan.size
        shaping = plan.shaping
        stds: list[float | None] = []
        for key in prompt_keys:
            stats = self._statistics.prompts.load(key)
            stds.append(None if stats is None else stats.std_ema)
        scale = 1.0 if budget is not None else self._scale()
        counts, mean = self._counts(plan, stds, budget)
        rule = self.deadlines.current_rule(shaping, plan.policy)
        tokens_from_recent = None
        few = groups < MIN_COHORT  # a few groups alone say little about how many tokens groups need
        if rule is not None:
            recent = self.deadlines.recent_lengths(f"{plan.policy}/{size}")
            if few:
                tokens_from_recent = recent.deadline(rule)
            else:
                rule = replace(rule, recent=recent.quantile(rule))
        record = CohortRecord(
            policy=plan.policy,
            groups=groups,
            mean_candidates=size + (mean - size) * scale,
            explored=rule is not None and self.deadlines.should_explore(rule, plan.policy, groups),
            chosen=None if auto is None else auto.choice.reason,
        )

        def end(record: CohortRecord) -> None:
            self._on_cohort_end(record)
            if auto is None:
                return
            try:
                auto.end(record)
            except Exception:  # it must not fail the group that ends last, whose trajectories are not delivered yet
                logger.exception("nothing was learned from a batch of %d groups under auto", groups)

        start = None if auto is None else auto.start
        cohort = Cohort(record, rule, end, self._clock, start, tokens=tokens_from_recent, few=few)
        # Whether a prompt is saturated is decided before the load reduces its candidates: it says that its lengths are
        # spread, which the load does not change.
        return [
            Allocation(reduce_candidates(count, size, scale), cohort, shaping.is_saturated(size, count))
            for count in counts
        ]

    def _counts(self, plan: Plan, stds: Sequence[float | None], budget: int | None) -> tuple[Sequence[int], float]:
        """Return how many candidates each group of a cohort gets, before the load reduces them, and M'.

        M' is the mean candidates of a group, at most M_up: a request may name a policy that allows less than the
        server's.
        """
        shaping, size, name = plan.shaping, plan.size, f"{plan.policy}/{plan.size}"
        low, high = shaping.bounds(size)
        if budget is not None:
            # Exactly the budget is spent. Without statistics all prompts are equal and share evenly.
            spreads = stds if shaping.adaptive else [None] * len(stds)
            return allocate_by_std(spreads, budget=budget, low=low, high=high), budget / len(stds)
        stats = self._statistics.dataset.stats if shaping.budget is BudgetKind.CV_LOG else DatasetStats()
        mean = shaping.mean_candidates(size, stats.std, stats.mean)
        if shaping.adaptive and len(stds) < MIN_COHORT:
            price = self._prices.load(name) or ShadowPrice()
            counts = [price.candidates(std, mean, low, high) for std in stds]
            self._prices.save(name, asdict(price))
            return counts, mean
        # Whole numbers with M' as their mean, over this cohort and those before it.
        counts, self._remainders[name] = allocate_evenly(mean, len(stds), self._remainders.get(name, 0.0))
        if shaping.adaptive:
            return allocate_by_std(stds, budget=sum(counts), low=low, high=high), mean
        return counts, mean
