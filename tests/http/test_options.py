from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from darts_server.exceptions import InvalidRequest
from darts_server.http.options import GROUP, MAX_GROUP_SIZE, checked_option, merge_options, read_options
from darts_server.identifiers import NAME_CHARS
from darts_server.types import RequestOptions

NAMES = ("policy", "prompt_key", "group_id")


@pytest.mark.parametrize("value", [8, 8.0, "8", "08"])
def test_a_size_may_come_as_any_kind_of_number(value: object) -> None:
    size = checked_option("group_size", value, "here")
    assert size == 8
    assert isinstance(size, int)


@pytest.mark.parametrize(
    "value", [0, -1, 16385, 8.5, "8.0", "", " ", "-8", "²", "8 ", "99999", "9" * 5000, 1e300, float("nan"), True, [8]]
)
def test_another_size_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(InvalidRequest, match="here: must be the group's size, a whole number from 1 to 16384, got"):
        checked_option("group_size", value, "here")


@pytest.mark.parametrize("option", NAMES)
@pytest.mark.parametrize("value", ["a", "gsm8k/train 7", "ä😀", "x" * NAME_CHARS])
def test_a_name_is_taken_as_it_is(option: str, value: str) -> None:
    assert checked_option(option, value, "here") == value


@pytest.mark.parametrize("option", NAMES)
@pytest.mark.parametrize("value", ["", "  ", "a\nb", "a\0", "\ud800", "x" * (NAME_CHARS + 1), 3, None, ["a"]])
def test_what_is_no_name_is_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"here: must be .*1 to 256 printable characters, got") as caught:
        checked_option(option, value, "here")
    str(caught.value).encode()


def test_a_group_id_that_no_header_could_carry_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without ';'"):
        checked_option("group_id", "a;b", "here")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.sampled_from([*NAMES, "group_size"]), scalars | st.lists(scalars))
def test_anything_gives_a_value_or_is_refused(option: str, value: Any) -> None:
    try:
        taken = checked_option(option, value, "here")
    except InvalidRequest:
        return
    assert taken == value if option != "group_size" else isinstance(taken, int) and 1 <= taken <= MAX_GROUP_SIZE


@pytest.mark.parametrize(
    ("header", "xargs", "both"),
    [
        (RequestOptions(), {}, RequestOptions()),
        (RequestOptions(), {"darts_policy": "off"}, RequestOptions("off")),
        (RequestOptions("off"), {"darts_policy": "off"}, RequestOptions("off")),
        (RequestOptions("darts"), {"darts_prompt_key": "p"}, RequestOptions("darts", "p")),
        (RequestOptions(group_id="a"), {"darts_group_size": 8}, RequestOptions(group_id="a", group_size=8)),
        (RequestOptions(group_size=8), {"darts_group_size": 8.0}, RequestOptions(group_size=8)),
        (
            RequestOptions(),
            {"darts_prompt_key": "p", "darts_group_id": "a", "darts_group_size": "8"},
            RequestOptions(None, "p", "a", 8),
        ),
    ],
)
def test_header_and_body_are_alike_and_add_up(
    header: RequestOptions, xargs: dict[str, Any], both: RequestOptions
) -> None:
    assert merge_options(header, xargs) == both


@pytest.mark.parametrize(
    ("header", "xargs", "words"),
    [
        (RequestOptions("off"), {"darts_policy": "uniform"}, "darts_policy: 'uniform' contradicts 'off' of the header"),
        (RequestOptions(None, "p"), {"darts_prompt_key": "q"}, "contradicts 'p' of the header X-Darts-Prompt-Key"),
        (RequestOptions(group_id="a"), {"darts_group_id": "b"}, "contradicts 'a' of the header X-Darts-Group"),
        (RequestOptions(group_size=8), {"darts_group_size": 4}, "darts_group_size: 4 contradicts 8 of the header"),
        (RequestOptions(), {"darts_policy": 3}, "vllm_xargs.darts_policy: must be the name"),
        (RequestOptions(), {"darts_group_size": 0}, "from 1 to 16384, got 0"),
        (RequestOptions(), {"darts_on_stop": "wait"}, "darts_on_stop: must be one of answer, fail, got 'wait'"),
        (
            RequestOptions(on_stop="fail"),
            {"darts_on_stop": "answer"},
            "contradicts 'fail' of the header X-Darts-On-Stop",
        ),
        (
            RequestOptions(),
            {"darts_polcy": "off"},
            "unknown option; supported options are darts_policy, darts_prompt_key",
        ),
    ],
)
def test_contradictions_and_misspellings_are_refused(header: RequestOptions, xargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        merge_options(header, xargs)


# --- headers


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
        st.sampled_from(["x-darts-policy", "X-Darts-Prompt-Key", "X-Darts-Group", "x-darts-other", "Host"]),
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


@given(st.lists(st.tuples(st.sampled_from(["x-darts-prompt-key", GROUP]), st.binary(max_size=40)), max_size=3))
def test_any_bytes_give_possible_options_or_are_refused(raw: list[tuple[str, bytes]]) -> None:
    try:
        options = read_options(Headers(raw=[(name.encode(), value) for name, value in raw]))
    except InvalidRequest:
        return
    assert options.prompt_key is None or options.prompt_key.isprintable()
