"""Records that observers get."""

import pytest

from darts_server.records import VersionSpans, extend_spans


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
def test_spans_have_as_many_tokens_and_each_version_once_in_a_row(
    spans: VersionSpans, version: int, tokens: int, extended: VersionSpans
) -> None:
    assert extend_spans(spans, version, tokens) == extended
