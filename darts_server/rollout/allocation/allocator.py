"""Allocate candidates to groups, from the statistics of their prompts and of the groups that start with them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Literal

import numpy as np

from darts_server.engine.port import UNKNOWN_TOKENS, RequestTokens
from darts_server.policy.allocation import (
    ShadowPrice,
    allocate_by_std,
    allocate_evenly,
    reduce_candidates,
    share_left,
)
from darts_server.policy.auto.chooser import Choice
from darts_server.policy.auto.options import UNSHAPED as UNSHAPED_OPTION
from darts_server.policy.lengths import DatasetStats
from darts_server.policy.shaping import BudgetKind
from darts_server.policy.simulation.batch import BatchPlan
from darts_server.records import ChosenOption, CohortRecord, applied_policy
from darts_server.rollout.allocation.auto import AutoCohorts
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import MIN_COHORT, Statistics
from darts_server.rollout.plan import UNSHAPED, Plan

logger = logging.getLogger(__name__)

PRICE = json_kind("price", ShadowPrice)


@dataclass(slots=True)
class _WaitingGroup:
    prompt_key: str
    tokens: RequestTokens
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
        unfinished: requests that the engine runs or queues.
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
        unfinished: Callable[[], int] = lambda: 0,
    ) -> None:
        self._statistics = statistics
        self._prices = StoredValues(statistics.documents, PRICE)
        self.deadlines = Deadlines(statistics.documents, rng or np.random.default_rng())
        self.auto = AutoCohorts(statistics, self.deadlines, clock, opening)
        self._window = window
        self._on_cohort_end = on_cohort_end
        self._clock = clock
        self._scale = scale
        self._unfinished = unfinished
        self._capacity = statistics.latency.capacity
        # By policy and group size: groups that are allocated together must be comparable.
        self._waiting: dict[str, list[_WaitingGroup]] = {}
        self._remainders: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def allocate(self, plan: Plan, prompt_key: str, tokens: RequestTokens = UNKNOWN_TOKENS) -> Allocation:
        """Allocate candidates to one group, at least its size. Most policies wait ``window`` seconds for others."""
        if plan.auto is None and not plan.shaping.uses_cohort:
            return Allocation(reduce_candidates(plan.shaping.candidates(plan.size), plan.size, self._scale()))
        name = f"{plan.policy}/{plan.size}"
        if name not in self._waiting:
            self._waiting[name] = []
            task = asyncio.create_task(self._allocate_waiting(name, plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        allocation: asyncio.Future[Allocation] = asyncio.get_running_loop().create_future()
        self._waiting[name].append(_WaitingGroup(prompt_key, tokens, allocation))
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
            keys, tokens = [group.prompt_key for group in groups], [group.tokens for group in groups]
            chosen = await self.auto.choose(plan, keys, tokens)
            groups = [group for group in groups if not group.allocation.cancelled()]  # choosing took a while
            keys, tokens = [group.prompt_key for group in groups], [group.tokens for group in groups]
            allocations = self.allocate_cohort(plan, keys, tokens, chosen=chosen) if groups else []
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
        tokens: Sequence[RequestTokens] = (),
        budget: int | None = None,
        chosen: Choice | None = None,
        room: float = inf,
    ) -> list[Allocation]:
        """Allocate candidates to groups that make a cohort of their own.

        ``tokens``: of their requests, as far as they are known. ``budget``: candidates in all. ``chosen``: by
        `AutoCohorts.choose`; without ``room`` for its candidates, `off` instead.
        """
        groups, size = len(prompt_keys), plan.size
        stds: list[float | None] = []
        for key in prompt_keys:
            stats = self._statistics.prompts.load(key)
            stds.append(None if stats is None else stats.std_ema)
        scale = 1.0 if budget is not None else self._scale()
        if chosen is None:
            policy, shaping = plan.policy, plan.shaping
            counts, mean = self._counts(plan, stds, budget)
        else:
            chosen_plan = BatchPlan.of(chosen.option.shaping, size, stds)
            needed = sum(reduce_candidates(count, size, scale) for count in chosen_plan.candidates)
            if chosen.option.shaping is not None and needed > room:
                # As without `auto`, until as many groups are complete.
                reason = f"no room for the candidates of {chosen.option.name}{chosen.scope}"
                chosen = Choice(UNSHAPED_OPTION, reason, num_groups=chosen.num_groups)
                chosen_plan = BatchPlan.of(None, size, stds)
            policy, shaping = applied_policy(plan.policy, chosen.option.name), chosen.option.shaping or UNSHAPED
            counts, mean = chosen_plan.candidates, chosen_plan.mean_candidates
        rule, tokens_from_recent = self.deadlines.current_rule(shaping, policy), None
        few = groups < MIN_COHORT  # a few groups alone say little about how many tokens groups need
        if chosen is None and rule is not None:
            recent = self.deadlines.recent_lengths(f"{policy}/{size}")
            if few:
                tokens_from_recent = recent.deadline(rule)
            else:
                rule = replace(rule, recent=recent.quantile(rule))
        chosen_option = None
        if chosen is not None:
            carry: Literal["restart", "resume"] | None = None
            if chosen.begun is not None:
                carry = "resume"
            elif chosen.enough is not None:
                carry = "restart"
            chosen_option = ChosenOption(chosen.option.name, chosen.reason, carry)
        record = CohortRecord(
            policy=plan.policy,
            groups=groups,
            mean_candidates=size + (mean - size) * scale,
            predicted_seconds=None if chosen is None or chosen.forecast is None else chosen.seconds,
            explored=rule is not None
            and (chosen is None or not chosen.explores)
            and self.deadlines.should_explore(rule, policy, groups),
            chosen=chosen_option,
        )
        start, end = None, self._on_cohort_end
        if chosen is not None:
            # With fewer candidates, or past its deadline, it says nothing about what was forecast.
            planned = sum(counts) if scale == 1 and not record.explored else None
            start, learn = self.auto.follow(plan, prompt_keys, tokens, chosen, record, planned)

            def end(record: CohortRecord) -> None:
                self._on_cohort_end(record)
                try:
                    learn()
                except Exception:  # it must not fail the group that ends last, whose trajectories are not delivered yet
                    logger.exception("nothing was learned from a cohort of %d groups under auto", groups)

        cohort = Cohort(record, rule, end, self._clock, start, tokens=tokens_from_recent, few=few)

        def share() -> float:
            return share_left(self._capacity, self._unfinished(), cohort.running)

        applied = () if chosen is None else (shaping, share)
        # Whether a prompt is saturated is decided before the load reduces its candidates: it says that its lengths are
        # spread, which the load does not change.
        return [
            Allocation(reduce_candidates(count, size, scale), cohort, shaping.is_saturated(size, count), *applied)
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
