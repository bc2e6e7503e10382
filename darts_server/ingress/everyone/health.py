"""``GET /health`` and ``GET /metrics`` of an ingress."""

from http import HTTPStatus

from starlette.responses import JSONResponse, Response

from darts_server.ingress.call import Call
from darts_server.ingress.everyone.broadcast import broadcast
from darts_server.ingress.everyone.metrics_text import CONTENT_TYPE, merge_metrics
from darts_server.ingress.metrics import IngressMetrics
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.serving.lifecycle import Lifecycle

METRICS_SECONDS = 8.0
"""Prometheus waits for 10 by default."""


class Health:
    """Says how the replicas are."""

    def __init__(self, fleet: Fleet, metrics: IngressMetrics, lifecycle: Lifecycle) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._lifecycle = lifecycle

    async def health(self, call: Call) -> Response:
        """Respond with 200 while a replica serves and the ingress is not stopping."""
        is_well = bool(self._fleet.serving) and self._lifecycle.stop_reason is None
        replicas = [
            {
                "name": member.name,
                "state": member.state,
                "detail": member.detail or None,
                "requests": member.in_flight,
                "expected_tokens": round(member.load),
            }
            for member in self._fleet.members
        ]
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"stopping": self._lifecycle.stop_reason is not None, "replicas": replicas}, status)

    async def metrics(self, call: Call) -> Response:
        """Respond with the metrics of all replicas that answer, and the ingress's own."""
        result = await broadcast(self._fleet.reachable, Outgoing("GET", call.outgoing.target), METRICS_SECONDS)
        texts = {name: answer.body.decode() for name, answer in result.accepted.items()}
        return Response(merge_metrics(texts, self._metrics.text().decode()), media_type=CONTENT_TYPE)
