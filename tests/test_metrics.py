from prometheus_client import CollectorRegistry

from darts_server.metrics import Metrics, Sources
from darts_server.types import CandidateRecord, End, FinishReason, GroupRecord, Outcome, StopReason


def candidate(index: int, tokens: int, end: End | None = None, reason: StopReason | None = None) -> CandidateRecord:
    return CandidateRecord(index, tokens, FinishReason.STOP, end, reason, False, 0.0, 1.0, 0, 0)


def record(**changes: object) -> GroupRecord:
    fields: dict[str, object] = {
        "group_id": "g",
        "prompt_key": "p",
        "policy": "uniform",
        "size": 2,
        "outcome": Outcome.COMPLETED,
        "candidates": (
            candidate(0, 10, end=End.SHORT),
            candidate(1, 40, reason=StopReason.TAIL_PRUNED),
            candidate(2, 30, end=End.LONG),
        ),
        "started_at": 5.0,
        "ended_at": 8.0,
        "tail_wait": 1.5,
    }
    return GroupRecord(**fields | changes)  # type: ignore[arg-type]


def test_a_group_is_counted_once_with_all_its_candidates_and_tokens() -> None:
    registry = CollectorRegistry()
    metrics = Metrics("tiny", registry=registry)
    metrics.candidates_started(3)
    metrics.group_ended(record())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", **labels})

    assert value("darts_groups_total", outcome="completed") == 1
    assert value("darts_candidates_started_total") == 3
    assert value("darts_candidates_ended_total", reason="selected") == 2
    assert value("darts_candidates_ended_total", reason="tail_pruned") == 1
    assert value("darts_tokens_total", kind="generated") == 80
    assert value("darts_tokens_total", kind="returned") == 40
    assert value("darts_tokens_total", kind="wasted") == 40
    assert value("darts_group_duration_seconds_sum") == 3
    assert value("darts_tail_wait_seconds_sum") == 1.5
    assert value("darts_trajectory_length_tokens_sum", kind="generated") == 80
    assert value("darts_trajectory_length_tokens_count", kind="returned") == 2


def test_a_group_that_was_not_completed_waited_for_no_tail() -> None:
    registry = CollectorRegistry()
    Metrics("tiny", registry=registry).group_ended(record(outcome=Outcome.CANCELLED, tail_wait=None, candidates=()))
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("darts_groups_total", labels | {"outcome": "cancelled"}) == 1
    assert not registry.get_sample_value("darts_tail_wait_seconds_count", labels)


def test_a_metric_has_no_label_that_grows_with_use() -> None:
    registry = CollectorRegistry()
    Metrics("tiny", registry=registry).group_ended(record())
    labels = {label for family in registry.collect() for sample in family.samples for label in sample.labels}
    assert labels <= {"model_name", "outcome", "reason", "kind", "le"}


def test_gauges_ask_when_they_are_read() -> None:
    registry = CollectorRegistry()
    faults: list[str] = []
    sources = Sources(
        tracked=lambda: 7,
        fault=lambda: bool(faults),
        step_seconds=lambda _: None,
        mean_length=lambda _: None,
        length_quantile=lambda *_: None,
        budget_aversion=lambda: 1.0,
    )
    Metrics("tiny", sources, registry)
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("darts_prompts_tracked", labels) == 7
    assert registry.get_sample_value("darts_store_fault", labels) == 0
    faults.append("the disk is full")
    assert registry.get_sample_value("darts_store_fault", labels) == 1
