"""Records that observers get."""

import pytest

from darts_server.records import CandidateRecord, CohortRecord, GroupRecord, VersionSpans, extend_spans
from darts_server.types import FinishReason, Outcome, SelectedAs


@pytest.mark.parametrize(
    ("spans", "version", "tokens", "extended"),
    [
        ((), 3, 5, ((3, 5),)),
        ((), 3, 0, ()),
        (((1, 4),), 3, 5, ((1, 4), (3, 1))),
        (((1, 4),), 3, 4, ((1, 4),)),
        (((1, 4), (2, 3)), 3, 5, ((1, 4), (2, 1))),
        (((1, 4),), 1, 9, ((1, 9),)),
        (((1, 4), (2, 0)), 1, 9, ((1, 9),)),
    ],
)
def test_spans_have_all_tokens_and_neighbouring_spans_have_different_versions(
    spans: VersionSpans, version: int, tokens: int, extended: VersionSpans
) -> None:
    assert extend_spans(spans, version, tokens) == extended


def test_a_candidate_that_is_cut_within_its_carried_tokens_has_no_new_tokens() -> None:
    cut = CandidateRecord(0, 6, FinishReason.LENGTH, SelectedAs.LONG, None, True, 0.0, 1.0, 0, 0, resumed=10)
    cohort = CohortRecord("darts_cut", 1, 1.0)
    cohort.add_ended_group(GroupRecord("g", "p", "darts_cut", 1, Outcome.COMPLETED, (cut,), 0.0, 1.0, None))
    assert (cohort.generated_tokens, cohort.new_tokens) == (6, 0)
