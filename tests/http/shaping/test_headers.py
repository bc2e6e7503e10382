import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.headers import GROUP, POLICY, PROMPT_KEY, read_options
from darts_server.http.shaping.options import checked_option
from darts_server.types import RequestOptions


@pytest.mark.parametrize("name", ["X-Darts-Policy", "x-darts-policy", "X-DARTS-POLICY"])
def test_the_policy_is_read_whatever_the_case_of_the_name(name: str) -> None:
    assert read_options({name: " off ", "Authorization": "x"}).policy == "off"


def test_without_our_headers_no_option_is_set() -> None:
    assert read_options({"Content-Type": "application/json"}) == RequestOptions()


@pytest.mark.parametrize("value", ["gsm8k/train 7", "a=b;c", "ä😀"])
def test_the_prompt_key_is_read_as_the_client_meant_it(value: str) -> None:
    assert read_options({"X-Darts-Prompt-Key": f" {value} "}).prompt_key == value
    raw = [(b"x-darts-prompt-key", value.encode())]
    assert read_options(Headers(raw=raw)).prompt_key == value


def test_latin_1_is_understood_too() -> None:
    assert read_options(Headers(raw=[(b"x-darts-prompt-key", "ä".encode("latin-1"))])).prompt_key == "ä"


@pytest.mark.parametrize(
    ("value", "group_id", "size"),
    [
        ("id=a;size=8", "a", 8),
        (" Size = 8 ; ID = step 3/a=b ", "step 3/a=b", 8),
        ("id=a", "a", None),
        ("size=16384", None, 16384),
    ],
)
def test_a_groups_parts_come_in_any_order_and_either_may_be_missing(
    value: str, group_id: str | None, size: int | None
) -> None:
    assert read_options({"X-Darts-Group": value}) == RequestOptions(group_id=group_id, group_size=size)


@pytest.mark.parametrize(
    "value",
    ["", ";", "a", "id=a;", "id=a;id=a", "id=;size=8", "id=a;size=", "size=0", "size=16385", "size=8.0", "n=8", "=a"],
)
def test_a_malformed_group_is_refused_by_the_headers_name(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_options({"X-Darts-Group": value})
    assert caught.value.field == GROUP


@pytest.mark.parametrize("name", ["X-Darts-Polcy", "X-Darts-Group-Id", "X-Darts-"])
def test_a_misspelt_header_is_refused_and_the_known_ones_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match="x-darts-policy, x-darts-prompt-key, x-darts-group"):
        read_options({name: "off"})


def test_a_header_that_is_there_twice_must_say_the_same() -> None:
    assert read_options(Headers(raw=[(b"x-darts-policy", b"off")] * 2)).policy == "off"
    with pytest.raises(InvalidRequest, match="repeated with the values 'off' and 'darts'"):
        read_options(Headers(raw=[(b"x-darts-policy", b"off"), (b"x-darts-policy", b"darts")]))


printable = st.text(st.characters(min_codepoint=32, max_codepoint=0x250), max_size=20)
parts = st.sampled_from(["id", "size", "ID", " size ", ""])
groups = st.lists(st.tuples(parts, st.sampled_from(["=", ""]), printable | st.integers().map(str)), max_size=3).map(
    lambda some: ";".join("".join(part) for part in some)
)


@given(
    st.dictionaries(
        st.sampled_from([POLICY, "X-Darts-Prompt-Key", "X-Darts-Group", "x-darts-other", "Host"]),
        st.text() | printable | groups,
        max_size=3,
    )
)
def test_any_headers_give_possible_options_or_are_refused(headers: dict[str, str]) -> None:
    try:
        options = read_options(headers)
    except InvalidRequest:
        return
    for option in ("policy", "prompt_key", "group_id", "group_size"):
        value = getattr(options, option)
        assert value is None or checked_option(option, value, "") == value


@given(st.lists(st.tuples(st.sampled_from([PROMPT_KEY, GROUP]), st.binary(max_size=40)), max_size=3))
def test_any_bytes_give_possible_options_or_are_refused(raw: list[tuple[str, bytes]]) -> None:
    try:
        options = read_options(Headers(raw=[(name.encode(), value) for name, value in raw]))
    except InvalidRequest:
        return
    assert options.prompt_key is None or options.prompt_key.isprintable()
