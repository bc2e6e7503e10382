"""Prometheus collectors of the queue."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors
from darts_server.observers import QUEUE_ACTIVITIES, QUEUE_EVENTS, QUEUE_STATES, QueueObserver

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class QueueSources:
    """What is read when metrics are scraped.

    ``count``: number of prompts in a state. ``age``: seconds since the oldest prompt came.
    """

    count: Callable[[str], float]
    age: Callable[[], float]


class QueueMetrics(Collectors, QueueObserver):
    """Measure the queue. ``sources``: ``None`` where there is nothing to read."""

    def __init__(
        self, model_name: str, sources: QueueSources | None = None, registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(model_name, registry)
        self._events = self._counter(
            "darts_queue_events",
            "What happened to prompts and groups of the queue. stale: it was too old, and started again.",
            "event",
            QUEUE_EVENTS,
        )
        self._seconds = self._counter(
            "darts_queue_seconds",
            "What the queue did, in seconds. waiting: prompts were queued and none ran.",
            "activity",
            QUEUE_ACTIVITIES,
        )
        self._staleness = self._histogram(
            "darts_queue_staleness_versions",
            "Weight versions between the first token of a group of the queue and when it was handed out.",
            STALENESS_BUCKETS,
        ).labels(model_name)
        groups = self._gauge("darts_queue_groups", "Prompts and groups in the queue by state.", "state")
        age = self._gauge("darts_queue_oldest_seconds", "Age of the oldest prompt that was not acknowledged; 0: none.")
        if sources is not None:
            age.labels(model_name).set_function(sources.age)
            for state in QUEUE_STATES:
                groups.labels(model_name, state).set_function(partial(sources.count, state))

    def queue_events(self, event: str, count: int) -> None:
        self._events.labels(self._model, event).inc(count)

    def queue_active(self, activity: str, seconds: float) -> None:
        self._seconds.labels(self._model, activity).inc(seconds)

    def group_handed_out(self, staleness: int) -> None:
        self._staleness.observe(staleness)
