"""Prometheus collectors. They live on the default registry, so that vLLM's ``/metrics`` shows them too.

Every metric has the one label ``model_name``, beside its own. The classes implement the rooms' observer protocols.
"""

from darts_server.metrics.access import AccessMetrics
from darts_server.metrics.groups import Metrics, Sources
from darts_server.metrics.quality import QualityMetrics, QualitySources
from darts_server.metrics.weights import WeightMetrics

__all__ = ["AccessMetrics", "Metrics", "QualityMetrics", "QualitySources", "Sources", "WeightMetrics"]
