import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from darts_server.http.json_slices import WINDOW_BYTES, find_objects, strings_and_brackets

TEXTS = st.text(st.sampled_from('a"\\[]{},: é'), max_size=5)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.just("items"), inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@given(
    st.lists(OBJECTS, max_size=5),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    OBJECTS,
    st.sampled_from([None, 2]),
)
def test_each_object_of_a_list_is_found(
    items: list[Any], before: dict[str, Any], after: dict[str, Any], indent: int | None
) -> None:
    text = json.dumps(before | {"items": items} | after, indent=indent).encode()
    found = find_objects(text, "items")
    assert found is not None
    assert [json.loads(text[start:end]) for start, end in found.spans] == items
    assert json.loads(text[found.start : found.end]) == items
    sliced = [json.loads(b"[" + text[start:end] + b"]") for start, end in found.slices(20)]
    assert [item for each in sliced for item in each] == items
    assert all(sliced)


@given(VALUES)
def test_what_is_no_list_of_objects_is_not_found(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, dict | list) for each in value):
        assert find_objects(json.dumps({"a": 1, "items": value}).encode(), "items") is None
    assert find_objects(json.dumps([{"items": [{}]}]).encode(), "items") is None
    assert find_objects(json.dumps({"a": {"items": [value]}}).encode(), "items") is None


@given(st.binary(max_size=30), st.sampled_from([b"", b'{"items":[', b'{"items":[{}']))
def test_any_bytes_are_read_to_their_end(text: bytes, before: bytes) -> None:
    find_objects(before + text, "items")
    for start, end in strings_and_brackets(before + text):
        assert start < end <= len(before + text)


def test_strings_and_gaps_may_be_longer_than_a_window() -> None:
    for inner in ("x" * WINDOW_BYTES * 2, '\\"' * WINDOW_BYTES, "x" * (WINDOW_BYTES - 1) + '"' + "y" * 10):
        text = json.dumps({"items": [{"a": inner}, {"b": [1] * WINDOW_BYTES}]}).encode()
        found = find_objects(text, "items")
        assert found is not None
        assert len(found.spans) == 2
