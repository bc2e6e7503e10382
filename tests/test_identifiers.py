import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from darts_server.exceptions import InvalidRequest
from darts_server.identifiers import (
    NAME_CHARS,
    Name,
    check_name,
    decode_from_header,
    encode_for_header,
    is_name,
    replace_unprintable,
)


@pytest.mark.parametrize("name", ["a", "gsm8k/7", "日本 ä😀", "<b>'\"&", "x" * NAME_CHARS])
def test_names_may_have_all_printable_characters(name: str) -> None:
    check_name("field", name)
    assert TypeAdapter(Name).validate_python(name) == name


@pytest.mark.parametrize(
    "name", [" ", "a\nb", "a\r", "\0", "\x85", "\u2028", "\u202e", "\ud800", "x" * (NAME_CHARS + 1)]
)
def test_unprintable_names_are_refused_and_the_field_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^field: must be 1 to 256 printable characters"):
        check_name("field", name)
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(name)


@given(st.text(min_size=1, max_size=NAME_CHARS).filter(is_name))
def test_a_name_survives_a_header_a_log_line_and_json(name: str) -> None:
    header = encode_for_header(name)
    assert header.isascii()
    assert header.isprintable()
    assert not set(header) & set(" /?#<>\"'&;%") - {"%"}
    assert decode_from_header(header) == name
    assert len(name.splitlines()) == 1
    assert json.loads(json.dumps(name, ensure_ascii=False).encode()) == name


@given(st.text())
def test_text_without_unprintable_characters_is_one_printable_line(text: str) -> None:
    assert replace_unprintable(text).isprintable()
    assert len(replace_unprintable(text)) == len(text)
