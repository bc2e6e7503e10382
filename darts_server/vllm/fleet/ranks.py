"""Which data-parallel engine runs a group, and vLLM's priorities, by which waiting requests start."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.config import VllmConfig

RANK = "data_parallel_rank"  # vLLM's option of ``generate()``, which callers set by its header
KEPT_GROUPS = 4096  # groups that have ended, and whose callers may not have their answers yet
PRIORITY = "priority"
"""The argument of ``generate()``: ``--scheduling-policy priority`` starts waiting requests by it, the lowest first."""
BY_PRIORITY = "priority"  # vLLM's name for that policy
LEVEL = 1 << 40  # between two priorities of callers: more milliseconds than a server runs
MOST = (1 << 22) - 1  # the priority of callers beyond which all are the same: with the order they have 63 bits


class Ranks:
    """Keeps the candidates of a group on one engine, where they share the KV blocks of their prompt.

    A new group gets the engine that is up with the fewest running candidates and later turns; of equals the first.
    ``engine_core``: vLLM's client, which names the engines that are up by their ranks; ``None``: all are.
    """

    def __init__(self, count: int, engine_core: Any = None) -> None:
        self._core = engine_core
        self._running = [0] * count
        self._rank_of: dict[str, int] = {}
        self._candidates: Counter[str] = Counter()
        self._ended: OrderedDict[str, int] = OrderedDict()  # ranks of the newest groups
        self._joined: dict[str, str] = {}

    @contextmanager
    def candidate(self, request: str) -> Iterator[int]:
        """Count one more candidate of a request, or of the group that it was joined to, and yield its engine's rank."""
        group = self._joined.get(request, request)
        if group not in self._rank_of:
            up: Iterable[int] = range(len(self._running))
            if self._core is not None:
                up = map(partial(int.from_bytes, byteorder="little"), self._core.core_engines)
            least_loaded = min(up, key=self._running.__getitem__, default=0)
            # A group of single requests goes on when its first candidates have ended before its next request comes.
            self._rank_of[group] = self._ended.pop(group, least_loaded)
        rank = self._rank_of[group]
        self._running[rank] += 1
        self._candidates[group] += 1
        try:
            yield rank
        finally:
            self._running[rank] -= 1
            self._candidates[group] -= 1
            if not self._candidates[group]:  # the group has ended, too
                del self._candidates[group]
                self._ended[group] = self._rank_of.pop(group)
                if len(self._ended) > KEPT_GROUPS:
                    self._ended.popitem(last=False)

    @contextmanager
    def joined(self, request: str, group: str) -> Iterator[None]:
        """Count the candidates of a single request as its group's."""
        self._joined[request] = group
        try:
            yield
        finally:
            self._joined.pop(request, None)  # callers choose ids, and may have chosen this one twice

    def of(self, request: str, options: Mapping[str, Any]) -> int | None:
        """Return the rank of the engine that its caller has chosen for a request that runs or has just ended.

        If it has not chosen any: the rank of the group of its candidates; ``None`` if it is not known.
        """
        chosen: int | None = options.get(RANK)
        if chosen is not None:
            return chosen
        group = self._joined.get(request, request)
        return self._rank_of.get(group, self._ended.get(group))

    @contextmanager
    def running_on(self, rank: int) -> Iterator[None]:
        """Count a request that is no group's on an engine, if there is one of that rank: callers may choose it."""
        if not 0 <= rank < len(self._running):
            yield
            return
        self._running[rank] += 1
        try:
            yield
        finally:
            self._running[rank] -= 1


def place(config: VllmConfig, options: Mapping[str, Any], rank: int | None, order: float | None) -> Mapping[str, Any]:
    """Return the options of a request that is to run on an engine, unless there is only one or its caller chose one.

    ``order``: among requests of the same priority, in seconds; ``None`` or without priorities: as they come.
    """
    if rank is not None and options.get(RANK) is None and config.parallel_config.data_parallel_size > 1:
        options = {**options, RANK: rank}
    if order is not None and config.scheduler_config.policy == BY_PRIORITY:
        options = {**options, PRIORITY: combined(options.get(PRIORITY, 0), order)}
    return options


def combined(priority: int, order: float) -> int:
    """Return a priority for vLLM: that of the caller, and among equal ones ``order``, in seconds."""
    level, later = min(max(priority, -MOST), MOST), round(1000 * order)
    return level * LEVEL + min(max(later, -LEVEL // 2), LEVEL // 2 - 1)
