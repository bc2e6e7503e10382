from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.options import MAX_GROUP_SIZE, checked_option, merge_options
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
