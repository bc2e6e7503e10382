"""Which data-parallel engine runs a group, and vLLM's priorities, which decide the order of waiting requests."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig

RANK = "data_parallel_rank"
"""vLLM's option of ``generate()``. Callers set it by vLLM's header."""
# Groups that have ended, and whose callers may not have their answers yet.
KEPT_GROUPS = 4096
PRIORITY = "priority"
"""Option of ``generate()``. With ``--scheduling-policy priority``, the lowest starts first."""
BY_PRIORITY = "priority"
LEVEL = 1 << 40
"""Distance of two callers' priorities. It is more milliseconds than a server runs."""
MAX_PRIORITY = (1 << 22) - 1
"""Largest priority of callers. Together with the order it takes 63 bits."""


class Ranks:
    """Keeps the candidates of a group on one engine, where they share the KV blocks of their prompt.

    A new group gets the engine that is up with the fewest running requests. ``engine_core``: vLLM's client, whose
    ``core_engines`` are the engines that are up.
    """

    def __init__(self, count: int, engine_core: Any) -> None:
        self._core = engine_core
        self._running = [0] * count
        self._ranks: dict[str, int] = {}
        self._candidates: Counter[str] = Counter()
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._joined: dict[str, str] = {}

    @contextmanager
    def candidate(self, request: str) -> Iterator[int]:
        """Yield the rank of the request's group, and count a candidate there in the block."""
        group = self._joined.get(request, request)
        if group not in self._ranks:
            # A group of single requests continues on its engine if its first candidates end before its next request.
            self._ranks[group] = self._ended.pop(group, self._least_loaded())
        rank = self._ranks[group]
        self._running[rank] += 1
        self._candidates[group] += 1
        try:
            yield rank
        finally:
            self._running[rank] -= 1
            self._candidates[group] -= 1
            if not self._candidates[group]:
                del self._candidates[group]
                self._ended[group] = self._ranks.pop(group)
                if len(self._ended) > KEPT_GROUPS:
                    self._ended.popitem(last=False)

    def _least_loaded(self) -> int:
        """Return the rank with the fewest requests, or 0 if no engine is up."""
        ranks = [int.from_bytes(name, "little") for name in self._core.core_engines]
        return min(ranks, key=lambda rank: self._running[rank], default=0)

    @contextmanager
    def joined(self, request: str, group: str) -> Iterator[None]:
        """Count candidates of the request as candidates of the group in the block."""
        self._joined[request] = group
        try:
            yield
        finally:
            # Callers choose ids, and may have chosen this id twice.
            self._joined.pop(request, None)

    def rank_of(self, request: str, options: Mapping[str, Any]) -> int | None:
        """Return the rank of a request that runs or has just ended: its caller's choice, its group's rank, or None."""
        chosen: int | None = options.get(RANK)
        if chosen is not None:
            return chosen
        group = self._joined.get(request, request)
        return self._ranks.get(group, self._ended.get(group))

    @contextmanager
    def running_on(self, rank: int) -> Iterator[None]:
        """Count a request without a group on an engine in the block."""
        # Callers may choose a rank that does not exist.
        if not 0 <= rank < len(self._running):
            yield
            return
        self._running[rank] += 1
        try:
            yield
        finally:
            self._running[rank] -= 1


def placed_options(
    config: VllmConfig,
    options: Mapping[str, Any],
    rank: int | None,
    order: float | None,
) -> Mapping[str, Any]:
    """Return options that run a request on an engine, unless its caller chose one.

    ``order``: seconds that order requests of the same priority, or None for the order of arrival.
    """
    if rank is not None and options.get(RANK) is None and config.parallel_config.data_parallel_size > 1:
        options = {**options, RANK: rank}
    if order is not None and config.scheduler_config.policy == BY_PRIORITY:
        options = {**options, PRIORITY: combine_priority(options.get(PRIORITY, 0), order)}
    return options


def combine_priority(priority: int, order: float) -> int:
    """Return a priority for vLLM that sorts by the caller's priority first, and by ``order`` in seconds second."""
    level = min(max(priority, -MAX_PRIORITY), MAX_PRIORITY)
    milliseconds = min(max(round(1000 * order), -LEVEL // 2), LEVEL // 2 - 1)
    return level * LEVEL + milliseconds
