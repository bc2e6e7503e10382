from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from darts_server.exceptions import InvalidRequest
from darts_server.http.options import GROUP, merge_options, read_options, validate_option
from darts_server.identifiers import NAME_CHARS
from darts_server.types import RequestOptions

NAMES = ("policy", "prompt_key", "group_id")


@pytest.mark.parametrize(
    "value", [0, -1, 1025, 8.5, "8.0", "", " ", "-8", "²", "8 ", "99999", "9" * 5000, 1e300, float("nan"), True, [8]]
)
def test_another_size_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(InvalidRequest, match="here: must be the group's size, a whole number from 1 to 1024, got"):
        validate_option("group_size", value, "here")
    for size in (8, 8.0, "8", "08"):
        taken = validate_option("group_size", size, "here")
        assert (taken, type(taken)) == (8, int)


@pytest.mark.parametrize("option", NAMES)
def test_valid_names_are_accepted_unchanged_and_others_are_refused(option: str) -> None:
    assert validate_option(option, "gsm8k/train 7 ä😀", "here") == "gsm8k/train 7 ä😀"
    for wrong in ("", "\ud800", "x" * (NAME_CHARS + 1), 3, None, ["a"]):
        with pytest.raises(InvalidRequest, match=r"here: must be .*1 to 256 printable characters, got") as caught:
            validate_option(option, wrong, "here")
        str(caught.value).encode()
    if option == "group_id":
        # No header can have it.
        with pytest.raises(InvalidRequest, match="without ';'"):
            validate_option(option, "a;b", "here")


@pytest.mark.parametrize(
    ("header", "xargs", "both"),
    [
        (RequestOptions(), {}, RequestOptions()),
        (RequestOptions("off"), {"darts_policy": "off"}, RequestOptions("off")),
        (RequestOptions("darts"), {"darts_prompt_key": "p"}, RequestOptions("darts", "p")),
        (RequestOptions(group_size=8), {"darts_group_size": 8.0}, RequestOptions(group_size=8)),
        (
            RequestOptions(),
            {"darts_prompt_key": "p", "darts_group_id": "a", "darts_group_size": "8"},
            RequestOptions(None, "p", "a", 8),
        ),
    ],
)
def test_headers_and_vllm_xargs_accept_the_same_options_and_are_merged(
    header: RequestOptions, xargs: dict[str, Any], both: RequestOptions
) -> None:
    assert merge_options(header, xargs) == both


@pytest.mark.parametrize(
    ("header", "xargs", "words"),
    [
        (RequestOptions("off"), {"darts_policy": "uniform"}, "darts_policy: 'uniform' contradicts 'off' of the header"),
        (RequestOptions(group_size=8), {"darts_group_size": 4}, "darts_group_size: 4 contradicts 8 of the header"),
        (RequestOptions(), {"darts_policy": 3}, "vllm_xargs.darts_policy: must be the name"),
        (RequestOptions(), {"darts_on_stop": "wait"}, "darts_on_stop: must be one of answer, fail, got 'wait'"),
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


POLICY = "X-Darts-Policy"
KEY = "X-Darts-Prompt-Key"


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ([("Content-Type", b"application/json")], RequestOptions()),
        ([(POLICY, b" off "), ("Authorization", b"x")], RequestOptions("off")),
        ([("x-darts-policy", b"off")], RequestOptions("off")),
        ([(POLICY, b"off")] * 2, RequestOptions("off")),
        ([(KEY, b" gsm8k/train 7 ")], RequestOptions(prompt_key="gsm8k/train 7")),
        ([(KEY, b"a=b;c")], RequestOptions(prompt_key="a=b;c")),
        ([(KEY, "ä😀".encode())], RequestOptions(prompt_key="ä😀")),
        ([(KEY, "ä".encode("latin-1"))], RequestOptions(prompt_key="ä")),
        ([(GROUP, b"id=a;size=8")], RequestOptions(group_id="a", group_size=8)),
        ([(GROUP, b" Size = 8 ; ID = step 3/a=b ")], RequestOptions(group_id="step 3/a=b", group_size=8)),
        ([(GROUP, b"id=a")], RequestOptions(group_id="a")),
        ([(GROUP, b"size=1024")], RequestOptions(group_size=1024)),
    ],
)
def test_headers_are_read_as_their_sender_meant_them(headers: list[tuple[str, bytes]], options: RequestOptions) -> None:
    assert read_options(Headers(raw=[(name.lower().encode(), value) for name, value in headers])) == options
    assert read_options({name: value.decode("latin-1") for name, value in headers}) == options
    assert read_options({KEY: " ä😀 "}).prompt_key == "ä😀", "decoded already"


@pytest.mark.parametrize(
    "value",
    ["", ";", "a", "id=a;", "id=a;id=a", "id=;size=8", "id=a;size=", "size=0", "size=1025", "size=8.0", "n=8", "=a"],
)
def test_a_malformed_group_is_refused_by_the_headers_name(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_options({"X-Darts-Group": value})
    assert caught.value.field == GROUP


def test_misspelt_headers_and_repeated_headers_with_other_values_are_refused() -> None:
    for name in ("X-Darts-Polcy", "X-Darts-Group-Id", "X-Darts-"):
        with pytest.raises(InvalidRequest, match="x-darts-policy, x-darts-prompt-key, x-darts-group"):
            read_options({name: "off"})
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
def test_any_headers_give_valid_options_or_are_refused(headers: dict[str, str]) -> None:
    try:
        options = read_options(headers)
    except InvalidRequest:
        return
    for option in ("policy", "prompt_key", "group_id", "group_size"):
        value = getattr(options, option)
        assert value is None or validate_option(option, value, "") == value
