from prometheus_client import CollectorRegistry

from darts_server.metrics.verifiers import VerifierMetrics
from darts_server.types import VerifierResult
from tests.metrics.test_rollouts import value


def test_calls_are_counted_by_verifier_and_result_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics("tiny", ["math", "format"], registry)
    metrics.called("math", VerifierResult.REWARD, 0.25)
    metrics.called("math", VerifierResult.TIMEOUT, 30.0)
    metrics.called("math", VerifierResult.TIMEOUT, 30.0)
    shown = {
        (name, result): value(registry, "darts_verifier_calls_total", verifier=name, result=result)
        for name in ("math", "format")
        for result in VerifierResult
    }
    assert len(shown) == 14
    assert {key: count for key, count in shown.items() if count} == {
        ("math", VerifierResult.REWARD): 1.0,
        ("math", VerifierResult.TIMEOUT): 2.0,
    }
    assert value(registry, "darts_verifier_seconds_count", verifier="math") == 3
    assert value(registry, "darts_verifier_seconds_sum", verifier="math") == 60.25
