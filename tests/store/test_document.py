"""What can be stored, and whose mistake it is if something cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest, StateDamaged
from darts_server.store.document import checksum, decode, encode, named


@given(st.text(max_size=20))
def test_any_text_is_a_key(key: str) -> None:
    assert named("prompt", key) == ("prompt", key)


@pytest.mark.parametrize("key", ["\ud800", "x" * 65537, "\u00e4" * 32769], ids=["surrogate", "long", "long in UTF-8"])
def test_an_impossible_key_is_the_callers_mistake(key: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt key"):
        named("prompt", key)


@pytest.mark.parametrize("kind", ["", "Not a kind", "1", "a\n", "x" * 65])
def test_a_kind_is_an_identifier(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        named(kind, "a")


@pytest.mark.parametrize("document", [{"a": {}}, {"a": [1]}, {1: 1}, {"a": b""}], ids=repr)
def test_a_document_is_flat(document: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="JSON scalars"):
        encode(document)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\ud800", "x" * 65536], ids=lambda v: repr(v)[:9])
def test_a_value_is_finite_well_formed_and_small(value: float | str) -> None:
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        encode({"a": value})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 50_000, "1" * 5000], ids=lambda t: t[:3])
def test_what_is_no_document_is_damage(text: str) -> None:
    with pytest.raises(StateDamaged, match="JSON object"):
        decode(text)


def test_the_checksum_tells_what_belongs_to_what() -> None:
    rows = [("a", "b", "{}"), ("a", "b{}", ""), ("ab", "", "{}"), ("a", "b", "{ }")]
    assert len({checksum(*row) for row in rows}) == len(rows)
