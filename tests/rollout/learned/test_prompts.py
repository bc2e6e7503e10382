from dataclasses import replace

import pytest

from darts_server.policy.lengths import PromptStats
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Prompts, key_of
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents


def candidate(index: int, tokens: int, finish: FinishReason | None, end: SelectedAs | None = None) -> CandidateRecord:
    reason = None if end else DiscardReason.LONGER_THAN_NEEDED
    return CandidateRecord(index, tokens, finish, end, reason, False, 0.0, 1.0, 3, 4)


def record(*candidates: CandidateRecord) -> GroupRecord:
    return GroupRecord("g", "p", "uniform", 2, Outcome.COMPLETED, candidates, 0.0, 1.0, 0.5)


def learned(ended: GroupRecord) -> PromptStats:
    prompts = Prompts(Documents())
    assert prompts.learn(ended) is None, "it was new"
    stats = prompts.load("p")
    assert stats is not None
    return stats


FINISHED = (
    candidate(0, 10, FinishReason.STOP, SelectedAs.SHORT),
    candidate(1, 20, FinishReason.STOP, SelectedAs.SHORT),
    candidate(2, 30, FinishReason.STOP),
)


def test_a_group_whose_candidates_all_finished_gives_its_plain_mean_and_std() -> None:
    stats = learned(record(*FINISHED))
    assert (stats.mean_ema, stats.std_ema, stats.groups, stats.candidates) == (20, 10, 1, 3)
    assert stats.weight_version == 4


def test_the_length_of_a_pruned_candidate_is_censored() -> None:
    pruned = CandidateRecord(3, 15, None, None, DiscardReason.PRUNED, False, 0.0, 1.0, 3, 4, 0.2, 0.3)
    stats = learned(record(*FINISHED, pruned))
    assert stats.candidates == 4
    assert stats.mean_ema > 20  # of three lengths beyond 15 and one that is 15 it would not be


def test_lengths_of_stopped_and_truncated_candidates_are_censored() -> None:
    full, short, truncated, naive = (
        learned(record(*ended)).std_ema or 0.0
        for ended in (
            FINISHED,
            (*FINISHED[:2], candidate(2, 20, None)),
            (*FINISHED[:2], candidate(2, 30, FinishReason.LENGTH)),
            FINISHED[:2],
        )
    )
    assert short > naive
    assert truncated > full


@pytest.mark.parametrize(
    "useless",
    [
        replace(record(*FINISHED), outcome=Outcome.CANCELLED),
        replace(record(*FINISHED), outcome=Outcome.FAILED),
        replace(record(*FINISHED), prompt_key=None),
        record(candidate(0, 0, None)),
    ],
)
def test_nothing_is_learned_from_a_group_without_usable_lengths(useless: GroupRecord) -> None:
    documents = Documents()
    Prompts(documents).learn(useless)
    assert documents.kept == {}


def test_the_key_depends_on_tokens_and_other_inputs() -> None:
    keys = {key_of([1, 2]), key_of([2, 1]), key_of([1, 2, 3]), key_of([1, 2], "\x03"), key_of([1, 2], "adapter")}
    assert len(keys) == 5
    assert key_of([1, 2], "adapter") == key_of((1, 2), "adapter")
