import math
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from darts_server.metrics import AccessMetrics, RolloutMetrics, RolloutSources, WeightMetrics
from darts_server.records import CandidateRecord, ChosenOption, CohortRecord, GroupRecord, UpdateRecord
from darts_server.types import (
    DiscardReason,
    FinishReason,
    MaxLost,
    Outcome,
    SelectedAs,
    TurnKind,
    UpdateOutcome,
    VoteOutcome,
)


def candidate(
    index: int, tokens: int, selected_as: SelectedAs | None = None, reason: DiscardReason | None = None
) -> CandidateRecord:
    return CandidateRecord(index, tokens, FinishReason.STOP, selected_as, reason, False, 0.0, 1.0, 0, 0)


def record(**changes: Any) -> GroupRecord:
    fields: dict[str, Any] = {
        "group_id": "g",
        "prompt_key": "p",
        "policy": "uniform",
        "size": 2,
        "outcome": Outcome.COMPLETED,
        "candidates": (
            candidate(0, 10, selected_as=SelectedAs.SHORT),
            candidate(1, 40, reason=DiscardReason.TAIL_PRUNED),
            candidate(2, 30, selected_as=SelectedAs.LONG),
        ),
        "started_at": 5.0,
        "ended_at": 8.0,
        "tail_wait": 1.5,
    }
    return GroupRecord(**fields | changes)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "tiny", **labels})


def test_a_group_is_counted_once_with_all_its_candidates_and_tokens() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    metrics.candidates_started(3)
    metrics.group_ended(record())

    assert value(registry, "darts_groups_total", outcome="completed") == 1
    assert value(registry, "darts_candidates_started_total") == 3
    assert value(registry, "darts_candidates_ended_total", reason="selected") == 2
    assert value(registry, "darts_candidates_ended_total", reason="tail_pruned") == 1
    assert value(registry, "darts_tokens_total", kind="generated") == 80
    assert value(registry, "darts_tokens_total", kind="returned") == 40
    assert value(registry, "darts_tokens_total", kind="wasted") == 40
    assert value(registry, "darts_group_duration_seconds_sum") == 3
    assert value(registry, "darts_tail_wait_seconds_sum") == 1.5
    assert value(registry, "darts_trajectory_length_tokens_sum", kind="generated") == 80
    assert value(registry, "darts_trajectory_length_tokens_count", kind="returned") == 2


def test_a_group_that_was_not_completed_waited_for_no_tail() -> None:
    registry = CollectorRegistry()
    RolloutMetrics("tiny", registry=registry).group_ended(
        record(outcome=Outcome.CANCELLED, tail_wait=None, candidates=())
    )
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("darts_groups_total", labels | {"outcome": "cancelled"}) == 1
    assert not registry.get_sample_value("darts_tail_wait_seconds_count", labels)


def test_counters_are_there_from_the_start_and_no_metric_has_a_label_that_grows_with_use() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    before = counted(registry)
    assert ("darts_groups_total", "failed") in before
    metrics.candidates_started(3)
    metrics.single_request_classified(TurnKind.OPENING)
    metrics.group_sealed(True)
    metrics.group_ended(record())
    assert counted(registry) == before
    labels = {label for family in registry.collect() for sample in family.samples for label in sample.labels}
    assert labels == {
        "model_name",
        "outcome",
        "reason",
        "kind",
        "deadline",
        "explored",
        "matched",
        "full",
        "rule",
        "turn",
        "zero_variance",
        "le",
    }


def counted(registry: CollectorRegistry) -> set[tuple[str, ...]]:
    """Names and labels, the model's aside, of all that counters show."""
    counters = [family for family in registry.collect() if family.type == "counter"]
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name"))
        for family in counters
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_gauges_read_their_sources_at_each_scrape() -> None:
    registry = CollectorRegistry()
    faults: list[str] = []
    sources = RolloutSources(
        tracked=lambda: 7,
        fault=lambda: bool(faults),
        step_seconds=lambda _: None,
        start_seconds=lambda: 0.002,
        mean_length=lambda _: None,
        length_quantile=lambda *_: None,
        lost_share=lambda policy, max_lost: None,
        lost_group_share=lambda policy, max_lost: max_lost.groups,
        deadline_stretch=lambda policy, max_lost: 1 + max_lost.answers,
        pass_rate=lambda: 0.75,
        answer_length={"right": 30.0, "wrong": 50.0}.get,
        pattern_difference=lambda: -20.0,
        pattern_error=lambda: None,
        redundancy_scale=lambda: 0.25,
    )
    metrics = RolloutMetrics("tiny", sources, registry)
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("darts_prompts_tracked", labels) == 7
    assert registry.get_sample_value("darts_start_seconds", labels) == 0.002
    assert registry.get_sample_value("darts_redundancy_scale", labels) == 0.25
    assert registry.get_sample_value("darts_pass_rate", labels) == 0.75
    assert registry.get_sample_value("darts_answer_length_tokens", labels | {"answer": "wrong"}) == 50
    assert registry.get_sample_value("darts_pattern_difference_tokens", labels) == -20
    assert math.isnan(registry.get_sample_value("darts_pattern_error_tokens", labels) or 0)
    assert registry.get_sample_value("darts_store_fault", labels) == 0
    faults.append("the disk is full")
    assert registry.get_sample_value("darts_store_fault", labels) == 1

    cut = record(max_lost=MaxLost(0.25))
    metrics.group_ended(replace(cut, policy="cap"))
    metrics.group_ended(replace(cut, policy="auto", chosen=ChosenOption("cut 1.5 at 0.9", "it is fast")))
    for policy in ("cap", "auto: cut 1.5 at 0.9"):
        assert registry.get_sample_value("darts_deadline_stretch", labels | {"policy": policy}) == 1.25
        assert math.isnan(registry.get_sample_value("darts_deadline_lost_share", labels | {"policy": policy}) or 0)


def test_a_cohort_reports_its_budget_its_deadline_and_its_predicted_and_measured_time() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    cohort = CohortRecord("darts_cut", 64, 12.5, 60, False, predicted_seconds=2.0, measured_seconds=2.5)
    metrics.cohort_ended(cohort)
    chosen = ChosenOption("cut 1.5 at 0.9", "2 s a step, off 3 s")
    metrics.cohort_ended(replace(cohort, deadline=None, explored=True, predicted_seconds=None, chosen=chosen))

    assert (
        value(registry, "darts_cohorts_total", explored="false")
        == value(registry, "darts_cohorts_total", explored="true")
        == 1
    )
    assert value(registry, "darts_auto_cohorts_total", rule="cut") == 1
    assert value(registry, "darts_auto_cohorts_total", rule="off") == 0
    assert value(registry, "darts_budget_mean_candidates") == 12.5
    assert value(registry, "darts_deadline_tokens") == 60
    assert value(registry, "darts_rollout_seconds_sum", kind="predicted") == 2
    assert value(registry, "darts_rollout_seconds_sum", kind="measured") == 2.5


def test_cut_candidates_and_explored_tails_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    tail = replace(candidate(2, 30, selected_as=SelectedAs.LONG), cut=True)
    metrics.group_ended(record(candidates=(candidate(0, 10, selected_as=SelectedAs.SHORT), tail)))
    metrics.group_ended(record(cohort_deadline=25, completion_length=20, explored=True))
    metrics.group_ended(record(cohort_deadline=45, completion_length=20, explored=True))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", **labels})

    assert value("darts_candidates_cut_total") == 1
    assert value("darts_explored_candidates_total", deadline="beyond") == 1
    assert value("darts_explored_candidates_total", deadline="within") == 1
    assert value("darts_explored_beyond_tokens_total") == 5


def test_rewards_are_counted_by_match_and_rewarded_groups_by_zero_variance() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    metrics.rewards_reported(matched=5, unknown=2)
    metrics.rewards_reported(matched=1, unknown=0)
    metrics.group_rewarded(zero_variance=True)
    metrics.group_rewarded(zero_variance=False)
    metrics.group_rewarded(zero_variance=True)

    assert value(registry, "darts_rewards_total", matched="true") == 6
    assert value(registry, "darts_rewards_total", matched="false") == 2
    assert value(registry, "darts_rewarded_groups_total", zero_variance="true") == 2
    assert value(registry, "darts_rewarded_groups_total", zero_variance="false") == 1


def test_weight_updates_are_counted_with_their_phases_and_version() -> None:
    registry = CollectorRegistry()
    metrics = WeightMetrics("tiny", registry)

    assert value(registry, "darts_weight_version") == 0
    done = UpdateRecord(7, UpdateOutcome.COMPLETED, "push", "finish", False, {"load": 0.2, "pause": 0.02})
    for update in (done, replace(done, version=8), replace(done, version=8, outcome=UpdateOutcome.REFUSED, seconds={})):
        metrics.update_ended(update)
    assert value(registry, "darts_weight_version") == 8
    assert value(registry, "darts_weight_updates_total", outcome="completed") == 2
    assert value(registry, "darts_weight_updates_total", outcome="refused") == 1
    assert value(registry, "darts_weight_update_seconds_sum", phase="load") == 0.4
    assert value(registry, "darts_weight_update_seconds_count", phase="pause") == 2


def test_votes_are_counted_by_outcome_with_the_candidates_they_stopped() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", registry=registry)
    for outcome, stopped in ((VoteOutcome.DECIDED_EARLY, 3), (VoteOutcome.DECIDED_EARLY, 1), (VoteOutcome.COUNTED, 0)):
        metrics.vote_ended(outcome, stopped)
    by_outcome = [
        registry.get_sample_value("darts_votes_total", {"model_name": "tiny", "outcome": outcome})
        for outcome in VoteOutcome
    ]
    assert by_outcome == [2, 1, 0]
    assert registry.get_sample_value("darts_vote_candidates_stopped_total", {"model_name": "tiny"}) == 4


def test_refused_requests_are_counted_by_reason_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics = AccessMetrics("tiny", registry)
    metrics.refused("queue")
    labels = {"model_name": "tiny"}
    assert registry.get_sample_value("darts_requests_refused_total", labels | {"reason": "queue"}) == 1
    assert registry.get_sample_value("darts_requests_refused_total", labels | {"reason": "key"}) == 0
