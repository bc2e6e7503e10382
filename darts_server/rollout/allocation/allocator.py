"""How many candidates a group gets, from what is known of its prompt and of those that come with it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import floor

import numpy as np

from darts_server.policy.allocation.brownout import reduce_candidates
from darts_server.policy.allocation.optimum import allocate_by_std
from darts_server.policy.allocation.shadow_price import ShadowPrice, ShadowPriceState
from darts_server.policy.shaping import Shaping
from darts_server.rollout.allocation.budgets import SMALLEST_BATCH, Budgets
from darts_server.rollout.allocation.cohort import Allocation, Cohort, CohortTerms
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.rollout.learned.documents import DocumentStore, StoredValues
from darts_server.rollout.learned.prompts import Prompts
from darts_server.types import CohortRecord, GroupRecord

Kind = tuple[str, int]
"""Policy and group size: what is allocated together must be comparable."""


@dataclass(slots=True)
class _Waiting:
    """Groups of one kind that wait for their number of candidates."""

    shaping: Shaping
    groups: list[tuple[str, asyncio.Future[Allocation]]] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.groups]


class Allocator:
    """Allocates over the groups that come within ``window`` seconds (DARTS, adaptive redundancy allocation).

    The mean over all groups of one policy and size stays at what the budget says. What it learns is in ``documents``.
    ``scale``: how much of the redundancy there is room for now; but a total that a caller asks for is given.
    """

    def __init__(
        self,
        prompts: Prompts,
        budgets: Budgets,
        documents: DocumentStore,
        window: float,
        on_batch_end: Callable[[CohortRecord], None],
        clock: Callable[[], float],
        rng: np.random.Generator | None = None,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._prompts = prompts
        self._budgets = budgets
        self._prices = StoredValues(documents, "price", lambda value: ShadowPriceState(**value))
        self.deadlines = Deadlines(documents, rng or np.random.default_rng())
        self._with_deadlines: set[Kind] = set()
        self._window = window
        self._on_batch_end = on_batch_end
        self._clock = clock
        self._scale = scale
        self._waiting: dict[Kind, _Waiting] = {}
        self._carries: dict[Kind, float] = {}

    async def grant(self, policy: str, shaping: Shaping, size: int, key: str) -> Allocation:
        """Candidates for a group of ``size`` of the prompt ``key``, at least ``size``."""
        if not shaping.uses_cohort:
            return Allocation(reduce_candidates(shaping.candidates(size), size, self._scale()))
        loop = asyncio.get_running_loop()
        kind = (policy, size)
        if kind not in self._waiting:
            self._waiting[kind] = _Waiting(shaping)
            loop.call_later(self._window, self._close, kind)
        answer: asyncio.Future[Allocation] = loop.create_future()
        self._waiting[kind].groups.append((key, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                _give_back(answer.result())
            raise

    def grant_together(
        self, policy: str, shaping: Shaping, size: int, keys: Sequence[str], budget: int | None = None
    ) -> list[Allocation]:
        """Candidates for groups that make a batch by themselves; ``budget``: how many in all, else as ever."""
        counts, terms = self._allocate((policy, size), shaping, keys, budget)
        batch = Cohort(terms, self._on_batch_end, self._clock)
        return [Allocation(count, batch) for count in counts]

    def learn(self, record: GroupRecord) -> None:
        """Take in how long the group's M-th shortest trajectory was, if its policy has deadlines."""
        if (record.policy, record.size) in self._with_deadlines:
            self.deadlines.learn(record, _name(record.policy, record.size))

    def _close(self, kind: Kind) -> None:
        waiting = self._waiting.pop(kind)
        waiting.groups = [(key, answer) for key, answer in waiting.groups if not answer.cancelled()]
        if not waiting.groups:
            return
        try:
            counts, terms = self._allocate(kind, waiting.shaping, waiting.keys)
        except Exception as error:  # told to everyone who waits: nobody waits for ever
            for _, answer in waiting.groups:
                answer.set_exception(error)
            return
        batch = Cohort(terms, self._on_batch_end, self._clock)
        for (_, answer), count in zip(waiting.groups, counts, strict=True):
            answer.set_result(Allocation(count, batch))

    def _allocate(
        self, kind: Kind, shaping: Shaping, keys: Sequence[str], total: int | None = None
    ) -> tuple[list[int], CohortTerms]:
        """``total``: candidates in all, where the caller says it."""
        groups = len(keys)
        budget = self._budgets.decide(shaping, kind[1], keys, None if total is None else total / groups)
        stds = [self._prompts.std(key) for key in keys]
        mean = budget.mean
        if total is None:
            scale, size = self._scale(), kind[1]
            counts = [reduce_candidates(count, size, scale) for count in self._counts(kind, shaping, mean, stds)]
            mean -= (mean - size) * (1 - scale)
        else:
            counts = _spent(kind, shaping, total, stds)
        # A few groups by themselves say as little of what groups need.
        few = groups < SMALLEST_BATCH
        rule = self.deadlines.rule(shaping)
        if rule is not None:
            self._with_deadlines.add(kind)
        return counts, CohortTerms(
            policy=kind[0],
            groups=groups,
            mean_candidates=mean,
            predicted_seconds=budget.seconds,
            deadline=None if few else rule,
            tokens=self.deadlines.recent(rule, _name(*kind)) if rule is not None and few else None,
            explored=rule is not None and self.deadlines.explores(rule),
        )

    def _counts(self, kind: Kind, shaping: Shaping, target: float, stds: Sequence[float | None]) -> list[int]:
        low, high = shaping.bounds(kind[1])
        if not shaping.adaptive:
            return self._even(kind, target, len(stds))
        if len(stds) < SMALLEST_BATCH:
            price = ShadowPrice(target, low, high, self._prices.load(_name(*kind)))
            counts = [price.candidates(std) for std in stds]
            recent, debt, carry = price.state.recent, price.state.debt, price.state.carry
            self._prices.save(_name(*kind), {"recent": list(recent), "debt": debt, "carry": carry})
            return counts
        return allocate_by_std(stds, budget=sum(self._even(kind, target, len(stds))), low=low, high=high)

    def _even(self, kind: Kind, target: float, groups: int) -> list[int]:
        """Whole candidates with ``target`` as their mean, over this batch and those before it."""
        counts = []
        for _ in range(groups):
            wanted = target + self._carries.get(kind, 0.0)
            counts.append(floor(wanted + 0.5))
            self._carries[kind] = wanted - counts[-1]
        return counts


def _spent(kind: Kind, shaping: Shaping, total: int, stds: Sequence[float | None]) -> list[int]:
    """Exactly ``total`` candidates."""
    low, high = shaping.bounds(kind[1])
    # Prompts that nothing sets apart share evenly.
    apart = stds if shaping.adaptive else [None] * len(stds)
    return allocate_by_std(apart, budget=total, low=low, high=high)


def _give_back(grant: Allocation) -> None:
    """The caller left before it took the grant."""
    if grant.batch is not None:
        grant.batch.dropped()


def _name(policy: str, size: int) -> str:
    return f"{policy}/{size}"
