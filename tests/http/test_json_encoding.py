"""Arrays are encoded as lists are, and everything else as the json module does."""

import json
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.http.json_encoding import encode_ascii, encode_json

floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(floats), st.lists(st.integers(-(2**31), 2**31 - 1)), texts)
def test_arrays_are_read_back_exactly(numbers: list[float], tokens: list[int], text: str) -> None:
    value = {"numbers": array("d", numbers), "tokens": array("i", tokens), "same": np.array(numbers), "text": text}
    expected = {"numbers": numbers, "tokens": tokens, "same": numbers, "text": text}
    assert json.loads(encode_json(value)) == expected
    escaped = encode_ascii(value)
    assert escaped.isascii()
    assert "\n" not in escaped, "it is one line of an event"
    assert json.loads(escaped) == expected


def test_numbers_that_json_does_not_have_are_null() -> None:
    assert encode_json([float("nan"), array("d", [float("inf"), 1.0])]) == b"[null,[null,1.0]]"


@pytest.mark.parametrize("value", [object(), {"a": {1, object()}}])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_json(value)
