from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from darts_server.metrics.collectors import Reads, WeightMetrics, hide_creation_times
from darts_server.metrics.rollouts import DEADLINE_GAUGES, GAUGES, TOTALS, RolloutMetrics
from darts_server.records import CandidateRecord, CohortRecord, GroupRecord, UpdateRecord
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

UNKNOWN: Reads = dict.fromkeys([*GAUGES, *TOTALS, *DEADLINE_GAUGES], lambda *_: None)


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
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
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
    metrics.group_ended(record(outcome=Outcome.CANCELLED, tail_wait=None, candidates=()))
    assert value(registry, "darts_groups_total", outcome="cancelled") == 1
    assert value(registry, "darts_tail_wait_seconds_count") == 1, "it waited for no tail"


def test_resumed_tokens_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
    metrics.group_ended(record())
    assert value(registry, "darts_resumed_groups_total") == value(registry, "darts_resumed_tokens_total") == 0
    resumed = tuple(replace(each, resumed=5 * each.index) for each in record().candidates)
    metrics.group_ended(record(candidates=resumed))
    assert value(registry, "darts_resumed_groups_total") == 1
    assert value(registry, "darts_resumed_tokens_total") == 15


def test_no_series_shows_when_it_was_created() -> None:
    hide_creation_times()
    registry = CollectorRegistry()
    RolloutMetrics("tiny", UNKNOWN, registry)
    assert b"_created" not in generate_latest(registry)


def test_counters_exist_from_the_start_and_no_label_grows_with_use() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
    before = counted(registry)
    assert ("darts_groups_total", "failed") in before
    metrics.candidates_started(3)
    metrics.prompts_skipped(2)
    assert value(registry, "darts_prompts_skipped_total") == 2
    metrics.single_request_classified(TurnKind.OPENING)
    metrics.group_closed(True)
    metrics.group_ended(record())
    assert counted(registry) == before
    labels = {label for family in registry.collect() for sample in family.samples for label in sample.labels}
    names = "model_name outcome reason kind deadline explored matched full turn zero_variance le"
    assert labels == set(names.split())


def counted(registry: CollectorRegistry) -> set[tuple[str, ...]]:
    """Return the names and labels of all counters, without the model's name."""
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
    reads: dict[str, Callable[..., float | None]] = dict.fromkeys([*GAUGES, *TOTALS], lambda *_: None)
    reads |= {
        "darts_store_fault": lambda: bool(faults),
        "darts_observer_failures_total": lambda: 7,
        "darts_step_seconds": lambda size: size / 8,
        "darts_length_tokens": lambda kind, statistic: len(kind) if statistic == "p50" else None,
        "darts_deadline_lost_share": lambda policy, max_lost: None,
        "darts_deadline_lost_groups": lambda policy, max_lost: max_lost.groups,
        "darts_deadline_factor": lambda policy, max_lost: 1 + max_lost.answers,
    }
    metrics = RolloutMetrics("tiny", reads, registry)
    assert value(registry, "darts_step_seconds", sequences="16") == 2
    assert value(registry, "darts_length_tokens", kind="generated", statistic="p50") == 9
    assert value(registry, "darts_pass_rate") is None
    assert value(registry, "darts_observer_failures_total") == 7
    assert value(registry, "darts_store_fault") == 0
    faults.append("the disk is full")
    assert value(registry, "darts_store_fault") == 1

    cut = record(max_lost=MaxLost(0.25))
    metrics.group_ended(replace(cut, policy="cap"))
    metrics.group_ended(replace(cut, policy="darts_cut"))
    for policy in ("cap", "darts_cut"):
        assert value(registry, "darts_deadline_factor", policy=policy) == 1.25
        assert value(registry, "darts_deadline_lost_share", policy=policy) is None


def test_a_cohort_reports_its_budget_its_deadline_and_its_time() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
    cohort = CohortRecord("darts_cut", 64, 12.5, 60, measured_seconds=2.5, stale_tokens=7)
    metrics.cohort_ended(cohort)
    metrics.cohort_ended(replace(cohort, deadline=None, explored=True))

    for explored in ("false", "true"):
        assert value(registry, "darts_cohorts_total", explored=explored) == 1
    assert value(registry, "darts_tokens_total", kind="stale") == 2 * 7
    assert value(registry, "darts_budget_mean_candidates") == 12.5
    assert value(registry, "darts_deadline_tokens") == 60
    assert value(registry, "darts_rollout_seconds_sum") == 5


@pytest.mark.parametrize("selected_as", [SelectedAs.LONG, SelectedAs.LONG_TRUNCATED, SelectedAs.FILL])
def test_cut_candidates_and_explored_tails_are_counted(selected_as: SelectedAs) -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
    tail = replace(candidate(2, 30, selected_as=selected_as), cut=True)
    metrics.group_ended(record(candidates=(candidate(0, 10, selected_as=SelectedAs.SHORT), tail)))
    for deadline in (25, 45):
        long = candidate(3, 30, selected_as=selected_as)
        ended = record(cohort_deadline=deadline, completion_length=20, explored=True)
        short = [each for each in ended.candidates if each.selected_as is not SelectedAs.LONG]
        metrics.group_ended(replace(ended, candidates=(*short, long)))

    assert value(registry, "darts_candidates_cut_total") == 1
    assert value(registry, "darts_explored_candidates_total", deadline="beyond") == 1
    assert value(registry, "darts_explored_candidates_total", deadline="within") == 1
    assert value(registry, "darts_explored_beyond_tokens_total") == 5


def test_votes_are_counted_by_outcome_with_the_candidates_that_they_stopped() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics("tiny", UNKNOWN, registry)
    for stopped in (3, 1):
        metrics.vote_ended(VoteOutcome.DECIDED_EARLY, stopped)
    metrics.vote_ended(VoteOutcome.COUNTED, 0)
    assert [value(registry, "darts_votes_total", outcome=outcome) for outcome in VoteOutcome] == [2, 1, 0]
    assert value(registry, "darts_vote_candidates_stopped_total") == 4


def test_weight_updates_are_counted_by_outcome_with_the_seconds_of_their_phases() -> None:
    registry = CollectorRegistry()
    metrics = WeightMetrics("tiny", registry=registry)
    done = UpdateRecord(7, UpdateOutcome.COMPLETED, "push", "finish", False, {"load": 0.2, "pause": 0.02})
    metrics.update_ended(done)
    metrics.update_ended(replace(done, version=8))
    metrics.update_ended(replace(done, version=8, outcome=UpdateOutcome.REFUSED, seconds={}))
    assert value(registry, "darts_weight_updates_total", outcome="completed") == 2
    assert value(registry, "darts_weight_updates_total", outcome="refused") == 1
    assert value(registry, "darts_weight_version") == 8
    assert value(registry, "darts_weight_update_seconds_sum", phase="load") == 0.4
    assert value(registry, "darts_weight_update_seconds_count", phase="pause") == 2
