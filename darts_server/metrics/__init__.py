"""Prometheus collectors. They use the default registry, so vLLM's ``/metrics`` serves them.

Every metric has the label ``model_name`` besides its own.
"""

from darts_server.metrics.collectors import AccessMetrics, ServingMetrics, WeightMetrics
from darts_server.metrics.quality import QualityMetrics, QualitySources
from darts_server.metrics.rollouts import QUANTILES, Reads, RolloutMetrics

__all__ = [
    "QUANTILES",
    "AccessMetrics",
    "QualityMetrics",
    "QualitySources",
    "Reads",
    "RolloutMetrics",
    "ServingMetrics",
    "WeightMetrics",
]
