from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors, Described, Reads
from darts_server.types import SessionEnd

GAUGES: Described = {"darts_sessions_open": ("Sessions of agents that are not over.", {})}
TURN_BUCKETS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 100, 200)
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)


class SessionMetrics(Collectors):
    def __init__(self, model_name: str, reads: Reads, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._create_read_metrics(GAUGES, reads)
        self._ended_sessions = self._counters(
            "darts_sessions",
            "Sessions of agents that are over, by their end. 'stopped' sessions were not needed any more.",
            "end",
            SessionEnd,
        )
        self._turns = self._histogram(
            "darts_session_turns", "Answered turns of a session, by its end.", TURN_BUCKETS, "end"
        )
        self._tool_seconds = self._histogram(
            "darts_session_tool_seconds", "Time between the turns of a session, by its end.", SECONDS_BUCKETS, "end"
        )
        self._refused_requests = self._counter(
            "darts_session_requests_refused",
            "Requests of a session after its end. A harness that sends them has not noticed the end.",
        )

    def session_ended(self, end: SessionEnd, turns: int, tool_seconds: float) -> None:
        self._ended_sessions[end].inc()
        self._turns.labels(self._model, end).observe(turns)
        self._tool_seconds.labels(self._model, end).observe(tool_seconds)

    def request_refused(self) -> None:
        self._refused_requests.inc()
