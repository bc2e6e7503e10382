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
        self._engine_core = engine_core
        self._running_requests = [0] * count
        self._rank_of_group: dict[str, int] = {}
        self._running_candidates: Counter[str] = Counter()
        self._rank_of_ended_group: OrderedDict[str, int] = OrderedDict()
        self._joined_group: dict[str, str] = {}

    @contextmanager
    def count_candidate(self, request_id: str) -> Iterator[int]:
        """Yield the rank of the request's group, and count a candidate there in the block."""
        # A request that has joined no group is a group of its own.
        group_id = self._joined_group.get(request_id, request_id)
        if group_id not in self._rank_of_group:
            # A group of single requests continues on its engine if its first candidates end before its next request.
            rank = self._rank_of_ended_group.pop(group_id, self._least_loaded_rank())
            self._rank_of_group[group_id] = rank
        rank = self._rank_of_group[group_id]
        self._running_requests[rank] += 1
        self._running_candidates[group_id] += 1
        try:
            yield rank
        finally:
            self._running_requests[rank] -= 1
            self._running_candidates[group_id] -= 1
            if not self._running_candidates[group_id]:
                del self._running_candidates[group_id]
                self._rank_of_ended_group[group_id] = self._rank_of_group.pop(group_id)
                if len(self._rank_of_ended_group) > KEPT_GROUPS:
                    self._rank_of_ended_group.popitem(last=False)

    def _least_loaded_rank(self) -> int:
        ranks = [int.from_bytes(name, "little") for name in self._engine_core.core_engines]
        return min(ranks, key=lambda rank: self._running_requests[rank], default=0)

    @contextmanager
    def join_group(self, request_id: str, group_id: str) -> Iterator[None]:
        self._joined_group[request_id] = group_id
        try:
            yield
        finally:
            # Callers choose ids, and may have chosen this id twice.
            self._joined_group.pop(request_id, None)

    def rank_of(self, request_id: str, options: Mapping[str, Any]) -> int | None:
        """Return the rank of a request that runs or has just ended: its caller's choice, its group's rank, or None."""
        callers_rank: int | None = options.get(RANK)
        if callers_rank is not None:
            return callers_rank
        group_id = self._joined_group.get(request_id, request_id)
        return self._rank_of_group.get(group_id, self._rank_of_ended_group.get(group_id))

    @contextmanager
    def count_request(self, rank: int) -> Iterator[None]:
        # Callers may choose a rank that does not exist.
        if not 0 <= rank < len(self._running_requests):
            yield
            return
        self._running_requests[rank] += 1
        try:
            yield
        finally:
            self._running_requests[rank] -= 1


def add_placement(
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
    # Both are clipped, so that the order never reaches another level, and the result fits into 64 bits.
    level = min(max(priority, -MAX_PRIORITY), MAX_PRIORITY)
    milliseconds = min(max(round(1000 * order), -LEVEL // 2), LEVEL // 2 - 1)
    return level * LEVEL + milliseconds
