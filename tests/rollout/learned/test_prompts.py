import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from darts_server.estimates.lengths import Observation, PromptStats, estimate_lengths
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Statistics, key_of, observations
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents


def candidate(index: int, tokens: int, finish: FinishReason | None, end: SelectedAs | None = None) -> CandidateRecord:
    reason = None if end else DiscardReason.LONGER_THAN_NEEDED
    return CandidateRecord(index, tokens, finish, end, reason, False, 0.0, 1.0, 3, 4)


def record(*candidates: CandidateRecord) -> GroupRecord:
    return GroupRecord("g", "p", "uniform", 2, Outcome.COMPLETED, candidates, 0.0, 1.0, 0.5)


pytestmark = pytest.mark.anyio


def learned(ended: GroupRecord) -> PromptStats:
    statistics = Statistics(Documents())
    statistics.group_ended(ended)
    stats = statistics.prompts.load("p")
    assert stats is not None
    return stats


FINISHED = (
    candidate(0, 10, FinishReason.STOP, SelectedAs.SHORT),
    candidate(1, 20, FinishReason.STOP, SelectedAs.SHORT),
    candidate(2, 30, FinishReason.STOP),
)


async def test_a_group_whose_candidates_all_finished_gives_its_plain_mean_and_std() -> None:
    stats = learned(record(*FINISHED))
    assert (stats.mean_ema, stats.std_ema, stats.groups, stats.candidates) == (20, 10, 1, 3)
    assert stats.weight_version == 4


def test_lengths_of_candidates_that_would_have_been_longer_are_censored() -> None:
    pruned = replace(candidate(3, 15, None), reason=DiscardReason.PRUNED)
    cut = replace(candidate(4, 12, FinishReason.STOP, SelectedAs.SHORT), cut=True)
    truncated = candidate(5, 30, FinishReason.LENGTH, SelectedAs.FILL)
    ended = record(*FINISHED[:2], candidate(2, 20, None), pruned, cut, truncated, candidate(6, 0, None))
    known = [Observation(10), Observation(20)]
    stopped = [Observation(tokens, censored=True) for tokens in (20, 15, 12)]
    assert observations(ended) == [*known, *stopped, Observation(30, censored=True)]
    assert observations(ended, censor_truncated=False) == [*known, *stopped, Observation(30)]


TRUNCATED = candidate(5, 30, FinishReason.LENGTH, SelectedAs.FILL)
CUT = replace(candidate(6, 12, FinishReason.LENGTH, SelectedAs.SHORT), cut=True)


@pytest.mark.parametrize(
    ("candidates", "allowed", "limit"),
    [
        (FINISHED, 96, 96),
        (FINISHED, None, None),
        ((*FINISHED, CUT), 96, 96),
        ((*FINISHED, TRUNCATED), None, 30),
        # The model's context ended the candidate before its request did.
        ((*FINISHED, TRUNCATED), 96, 30),
        (FINISHED, 29, None),
    ],
)
async def test_the_limit_is_where_candidates_were_truncated_or_what_the_request_allows(
    candidates: tuple[CandidateRecord, ...], allowed: int | None, limit: int | None
) -> None:
    stats = learned(replace(record(*candidates), max_tokens=allowed, prompt_tokens=7))
    assert (stats.max_tokens, stats.prompt_tokens) == (limit, 7)


async def test_a_group_that_is_truncated_is_learned_as_truncated() -> None:
    stats = learned(replace(record(*[replace(TRUNCATED, index=i, tokens=96) for i in range(4)]), max_tokens=96))
    assert stats.mean_ema > 96, "an estimate of what the lengths would be without the limit"
    assert stats.lengths == "96+ 96+ 96+ 96+"
    assert all(stats.is_truncated(o) for o in stats.observations)


async def test_the_lengths_of_a_group_are_estimated_once() -> None:
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is estimate_lengths.__code__

    statistics = Statistics(Documents())
    sys.setprofile(count)
    try:
        statistics.group_ended(record(*FINISHED))
    finally:
        sys.setprofile(None)
    assert calls == 1


@pytest.mark.parametrize(
    "useless",
    [
        replace(record(*FINISHED), outcome=Outcome.CANCELLED),
        replace(record(*FINISHED), outcome=Outcome.FAILED),
        record(candidate(0, 0, None)),
    ],
)
def test_nothing_is_learned_from_a_group_without_usable_lengths(useless: GroupRecord) -> None:
    documents = Documents()
    Statistics(documents).group_ended(useless)
    assert documents.kept == {}


async def test_without_a_key_only_the_data_set_learns() -> None:
    documents = Documents()
    statistics = Statistics(documents)
    statistics.group_ended(replace(record(*FINISHED), prompt_key=None))
    statistics.flush()
    assert {kind for kind, _ in documents.kept} == {"profile", "step"}


def test_the_key_depends_on_tokens_and_other_inputs_alone() -> None:
    inputs: list[tuple[Any, ...]] = [([1, 2],), ([2, 1],), ([1, 2, 3],), ([1, 2], "\x03"), ([1, 2], "adapter")]
    assert len({key_of(*each) for each in inputs}) == 5
    assert key_of([1, 2], "adapter") == key_of((1, 2), "adapter")
    assert key_of([1, 2, 3]) == "ab44942e43d9d2af667cb73e"
