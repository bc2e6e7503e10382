"""How many candidates a group gets, from what is known of its prompt and of those that come with it."""

import asyncio
from dataclasses import dataclass, field
from math import floor

from darts_server.policy.allocation import ShadowPrice, batch_candidates
from darts_server.policy.shaping import Shaping
from darts_server.rollout.prompts import Prompts

SMALLEST_BATCH = 8
"""Fewer prompts than this say less about each other than the last requests do, so each is priced against those."""

Kind = tuple[str, int]
"""Policy and group size: what is allocated together must be comparable."""


@dataclass(slots=True)
class _Batch:
    """Groups of one kind that wait for their number of candidates."""

    shaping: Shaping
    size: int
    waiting: list[tuple[str, asyncio.Future[int]]] = field(default_factory=list)


class Allocator:
    """Allocates over the groups that come within ``window`` seconds (DARTS, adaptive redundancy allocation).

    The mean over all groups of one policy and size stays at ``redundancy`` times the size.
    """

    def __init__(self, prompts: Prompts, window: float) -> None:
        self._prompts = prompts
        self._window = window
        self._batches: dict[Kind, _Batch] = {}
        self._prices: dict[Kind, ShadowPrice] = {}
        self._carries: dict[Kind, float] = {}

    async def candidates(self, policy: str, shaping: Shaping, size: int, key: str) -> int:
        """Candidates for a group of ``size`` of the prompt ``key``, at least ``size``."""
        if not shaping.adaptive:
            return shaping.candidates(size)
        loop = asyncio.get_running_loop()
        kind = (policy, size)
        if kind not in self._batches:
            self._batches[kind] = _Batch(shaping, size)
            loop.call_later(self._window, self._close, kind)
        answer: asyncio.Future[int] = loop.create_future()
        self._batches[kind].waiting.append((key, answer))
        return await answer

    def _close(self, kind: Kind) -> None:
        batch = self._batches.pop(kind)
        waiting = [(key, answer) for key, answer in batch.waiting if not answer.cancelled()]
        try:
            counts = self._allocate(kind, batch, [self._prompts.std(key) for key, _ in waiting])
        except Exception as error:  # told to everyone who waits: nobody waits for ever
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), count in zip(waiting, counts, strict=True):
            answer.set_result(count)

    def _allocate(self, kind: Kind, batch: _Batch, stds: list[float | None]) -> list[int]:
        low, high = batch.shaping.bounds(batch.size)
        # A request may name this policy on a server whose redundancy is above what one prompt may get.
        target = min(batch.shaping.redundancy * batch.size, high)
        if len(stds) < SMALLEST_BATCH:
            price = self._prices.setdefault(kind, ShadowPrice(target, low, high))
            return [price.candidates(std) for std in stds]
        wanted = target * len(stds) + self._carries.get(kind, 0.0)
        budget = floor(wanted + 0.5)
        self._carries[kind] = wanted - budget
        return batch_candidates(stds, budget=budget, low=low, high=high)
