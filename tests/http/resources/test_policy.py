import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.http.serving import client

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
URL = "/darts/v1/policy"
SETTINGS = {
    "policy": "auto",
    "redundancy": 1.5,
    "max_redundancy": 2.0,
    "num_longest": 1,
    "tail": "sampled",
    "group_size": None,
}


@pytest.fixture(scope="module")
def running() -> Iterator[TestClient]:
    with client() as caller:
        yield caller


def test_the_settings_are_returned_with_the_names_of_the_policies(running: TestClient) -> None:
    answer = running.get(URL).json()
    assert answer["policies"][0] == "off"
    assert {"uniform", "darts"} < set(answer["policies"])
    assert SETTINGS.items() <= answer.items()
    assert not answer.keys() & {"state_dir", "cohort_window"}


def test_a_change_takes_effect_at_once_and_other_settings_stay() -> None:
    with client() as caller:
        answer = caller.patch(URL, json={"policy": "off", "group_size": 8})
        assert answer.status_code == 200
        assert answer.json() == caller.get(URL).json()
        assert (SETTINGS | {"policy": "off", "group_size": 8}).items() <= answer.json().items()
        assert caller.patch(URL, json={"group_size": None}).json()["group_size"] is None


@pytest.mark.parametrize(
    ("patch", "param", "words"),
    [
        ({"tail": "longest", "polcy": "off"}, "polcy", "unknown setting"),
        ([], "body", "must be a JSON object"),
    ],
)
def test_a_wrong_change_is_refused_as_a_whole_and_names_its_key(
    running: TestClient, patch: Any, param: str, words: str
) -> None:
    before = running.get(URL).json()
    answer = running.patch(URL, json=patch)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert words in error["message"]
    assert running.get(URL).json() == before


def test_a_huge_body_is_refused(running: TestClient) -> None:
    assert running.patch(URL, content=b" " * 20_000 + b"{}").status_code == 413


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
likely = st.sampled_from(["off", "uniform", "darts", "sampled", "longest", 1, 2, 4, 1.5, None, 0, -1, "2"])
keys = st.sampled_from([*SETTINGS, "state_dir", "cohort_window"]) | st.text()
patches = st.dictionaries(keys, likely | values, max_size=4) | values


@given(body=patches.map(lambda patch: json.dumps(patch).encode()) | st.binary())
@settings(deadline=None)
def test_any_body_takes_effect_or_is_refused_and_changes_nothing(running: TestClient, body: bytes) -> None:
    before = running.get(URL).json()
    answer = running.patch(URL, content=body)
    after = running.get(URL).json()
    if answer.status_code == 200:
        assert answer.json() == after == before | json.loads(body)
    else:
        assert (answer.status_code, after) == (400, before)
        assert answer.json()["error"]["param"] is not None
