"""The ingress's own metrics."""

from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class Result(StrEnum):
    """How a request to a replica ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """With a status from 400 on."""
    RERUN = "rerun"
    """The replica was lost before the caller had got anything: it is run again."""
    BROKEN = "broken"
    """The replica was lost when the caller had got a part of the answer."""
    CANCELLED = "cancelled"
    """The caller disconnected."""

    @classmethod
    def of(cls, status: int) -> Self:
        return cls.ANSWERED if status < HTTPStatus.BAD_REQUEST else cls.REFUSED


class IngressMetrics:
    """Count requests. ``states``: the state of each replica, by its name."""

    def __init__(self, states: Callable[[], dict[str, str]], all_states: list[str]) -> None:
        self._registry = CollectorRegistry()
        self._states = states
        self._all_states = all_states
        self._requests = Counter(
            "darts_ingress_requests",
            "Requests that were sent to a replica, by how they ended.",
            ["replica", "outcome"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "darts_ingress_added_seconds",
            "Seconds of the ingress: from a request's last byte until it was sent to the replica that answered it, and "
            "from the last byte of the answer until it was passed on.",
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._waits = Counter(
            "darts_ingress_replica_seconds",
            "Seconds that requests spent on replicas.",
            ["replica"],
            registry=self._registry,
        )
        self._observations = Counter(
            "darts_ingress_observations",
            "Observations that were sent to a replica: groups and rewards of others, from which it learns.",
            ["replica", "outcome"],
            registry=self._registry,
        )
        self._replicas = Gauge(
            "darts_ingress_replicas", "Number of replicas, by state.", ["state"], registry=self._registry
        )

    def request_ended(self, replica: str, result: Result, seconds: float) -> None:
        self._requests.labels(replica, result).inc()
        self._waits.labels(replica).inc(seconds)

    def observations_sent(self, replica: str, outcome: str, count: int) -> None:
        """``outcome``: ``learned``, ``repeated``, ``missed`` or ``refused``."""
        self._observations.labels(replica, outcome).inc(count)

    def added(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        found = list(self._states().values())
        for state in self._all_states:
            self._replicas.labels(state).set(found.count(state))
        return generate_latest(self._registry)
