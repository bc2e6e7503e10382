from dataclasses import replace

import pytest

from darts_server.rollout.provenance import Provenance, response_id
from tests.rollout.test_prompts import FINISHED, record


def kept(*ids: str, limit: int = 100) -> Provenance:
    provenance = Provenance(limit)
    for group_id in ids:
        provenance.group_ended(replace(record(*FINISHED), group_id=group_id))
    return provenance


def names(provenance: Provenance, name: str) -> list[str]:
    return [r.group_id for r in provenance.find(name)]


def test_a_group_is_found_by_its_id_and_all_of_a_response_by_the_responses() -> None:
    provenance = kept("cmpl-a-10", "cmpl-a-2", "cmpl-b-0", "chatcmpl-c")
    assert names(provenance, "cmpl-a-2") == ["cmpl-a-2"]
    assert names(provenance, "cmpl-a") == ["cmpl-a-2", "cmpl-a-10"]
    assert names(provenance, "chatcmpl-c") == ["chatcmpl-c"]
    assert names(provenance, "cmpl") == []


def test_only_the_latest_are_kept() -> None:
    provenance = kept("cmpl-a-0", "cmpl-a-1", "cmpl-b-0", limit=2)
    assert names(provenance, "cmpl-a") == ["cmpl-a-1"]
    assert names(kept("cmpl-a-0", "cmpl-b-0", limit=1), "cmpl-a") == []


def test_a_request_id_that_is_used_again_names_the_newer_group() -> None:
    provenance = kept("cmpl-a-0", "cmpl-a-1", "cmpl-a-0", limit=2)
    assert names(provenance, "cmpl-a") == ["cmpl-a-0", "cmpl-a-1"]


@pytest.mark.parametrize(
    ("group_id", "response"),
    [("cmpl-ab12-3", "cmpl-ab12"), ("chatcmpl-8562169114280583", "chatcmpl-8562169114280583"), ("mine", "mine")],
)
def test_the_response_id_is_the_group_id_without_the_prompts_number(group_id: str, response: str) -> None:
    assert response_id(group_id) == response
