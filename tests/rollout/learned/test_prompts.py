from dataclasses import replace

import pytest

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.prompts import Prompts, key_of
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents


def candidate(index: int, tokens: int, finish: FinishReason | None, end: SelectedAs | None = None) -> CandidateRecord:
    reason = None if end else DiscardReason.LONGER_THAN_NEEDED
    return CandidateRecord(index, tokens, finish, end, reason, False, 0.0, 1.0, 3, 4)


def record(*candidates: CandidateRecord) -> GroupRecord:
    return GroupRecord("g", "p", "uniform", 2, Outcome.COMPLETED, candidates, 0.0, 1.0, 0.5)


FINISHED = (
    candidate(0, 10, FinishReason.STOP, SelectedAs.SHORT),
    candidate(1, 20, FinishReason.STOP, SelectedAs.SHORT),
    candidate(2, 30, FinishReason.STOP),
)


def test_a_group_whose_candidates_all_finished_gives_its_plain_mean_and_std() -> None:
    prompts = Prompts(Documents())
    assert prompts.std("p") is None
    prompts.learn(record(*FINISHED))
    stats = prompts.stats("p")
    assert stats is not None
    assert (stats.mean_ema, stats.std_ema, stats.groups, stats.candidates) == (20, 10, 1, 3)
    assert stats.weight_version == 4


def test_the_length_of_a_pruned_candidate_is_censored() -> None:
    pruned = CandidateRecord(3, 15, None, None, DiscardReason.PRUNED, False, 0.0, 1.0, 3, 4, 0.2, 0.3)
    with_it, without = Prompts(Documents()), Prompts(Documents())
    with_it.learn(record(*FINISHED, pruned))
    without.learn(record(*FINISHED))
    stats = with_it.stats("p")
    assert stats is not None
    assert stats.candidates == 4
    assert stats.mean_ema > 20  # of three lengths beyond 15 and one that is 15 it would not be


def test_lengths_of_stopped_and_truncated_candidates_are_censored() -> None:
    short, full = Prompts(Documents()), Prompts(Documents())
    full.learn(record(*FINISHED))
    short.learn(record(*FINISHED[:2], candidate(2, 20, None)))
    truncated = Prompts(Documents())
    truncated.learn(record(*FINISHED[:2], candidate(2, 30, FinishReason.LENGTH)))
    naive = Prompts(Documents())
    naive.learn(record(*FINISHED[:2]))
    assert (short.std("p") or 0) > (naive.std("p") or 0)
    assert (truncated.std("p") or 0) > (full.std("p") or 0)


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
