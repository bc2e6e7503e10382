"""Which keys and documents can be stored, and which errors the others raise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest, StateDamaged
from darts_server.store.document import check_name, checksum, decode, encode


@given(st.text(max_size=20))
def test_any_text_is_a_key(key: str) -> None:
    assert check_name("prompt", key) == ("prompt", key)


@pytest.mark.parametrize("key", ["\ud800", "x" * 65537, "\u00e4" * 32769], ids=["surrogate", "long", "long in UTF-8"])
def test_an_impossible_key_is_an_invalid_request(key: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt key"):
        check_name("prompt", key)


@pytest.mark.parametrize("kind", ["", "Not a kind", "1", "a\n", "x" * 65])
def test_a_kind_must_be_an_identifier(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        check_name(kind, "a")


@pytest.mark.parametrize("document", [{"a": {}}, {"a": [1]}, {1: 1}, {"a": b""}], ids=repr)
def test_a_document_must_be_flat(document: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="JSON scalars"):
        encode(document)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\ud800", "x" * 65536], ids=lambda v: repr(v)[:9])
def test_a_value_must_be_finite_well_formed_and_small(value: float | str) -> None:
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        encode({"a": value})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 50_000, "1" * 5000], ids=lambda t: t[:3])
def test_text_that_is_no_document_is_damage(text: str) -> None:
    with pytest.raises(StateDamaged, match="JSON object"):
        decode(text)


def test_the_checksum_covers_kind_key_and_text_separately() -> None:
    rows = [("a", "b", "{}"), ("a", "b{}", ""), ("ab", "", "{}"), ("a", "b", "{ }")]
    assert len({checksum(*row) for row in rows}) == len(rows)
