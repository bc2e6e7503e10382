import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import anyio
import msgspec
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, model_validator

from darts_server.exceptions import InvalidRequest, TooLarge
from darts_server.http import body as body_module
from darts_server.http.body import (
    INLINE_BYTES,
    MAX_DIGITS,
    Body,
    fail_fast,
    parse_body,
    parsed,
    read_body,
    split_objects,
)
from darts_server.http.resources.rewards import RewardsIn
from darts_server.http.resources.rollouts_models import RolloutsIn
from darts_server.http.resources.vote import VoteIn

pytestmark = pytest.mark.anyio
MAX_JSON_PARTS, MAX_PARTS_AT_ONCE, MAX_VALUES_AT_ONCE, MAX_UNQUOTED_AT_ONCE = 60_000, 5_000, 150_000, 2_000_000
"""About a tenth of what they are, so that the tests are fast."""


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_JSON_PARTS", "MAX_PARTS_AT_ONCE", "MAX_VALUES_AT_ONCE", "MAX_UNQUOTED_AT_ONCE"):
            patch.setattr(body_module, name, globals()[name])
        yield


async def test_a_body_that_announces_too_much_is_not_read() -> None:
    receive = AsyncMock()
    request = Request({"type": "http", "method": "PUT", "headers": [(b"content-length", b"4")]}, receive)
    with pytest.raises(TooLarge, match="at most 3 bytes"):
        await read_body(request, 3)
    receive.assert_not_called()


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_sender_that_hangs_or_disconnects_is_an_error(hangs: bool) -> None:
    async def receive() -> dict[str, str]:
        if hangs:
            await anyio.sleep_forever()
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "method": "PUT", "headers": []}, receive)
    with pytest.raises(InvalidRequest, match="is incomplete"):
        await read_body(request, 10, stall_seconds=0.01)


# --- validation -------------------------------------------------------------


class Item(Body):
    ids: list[int] | None = None
    anything: dict[str, Any] | None = None


class Items(Body):
    items: list[Item]


WRONG = ["x"] * 1000
UNKNOWN = {f"name{i}": 1 for i in range(1000)}


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (RolloutsIn, {"prompts": [{"token_ids": WRONG}] * 3, "group_size": 1}, "prompts[0].token_ids[0]"),
        (RolloutsIn, {"prompts": [{"text": "a"}], "group_size": 1} | UNKNOWN, "name0"),
        (VoteIn, {"prompt": "a", "n": 1, "pattern": {"choices": [1] * 1000}}, "pattern.choices[0]"),
    ],
)
def test_validation_ends_at_the_first_error(model: type[Body], body: dict[str, Any], field: str) -> None:
    raw = json.dumps(body).encode()
    with pytest.raises(ValidationError) as invalid:
        model.model_validate_json(raw)
    assert invalid.value.error_count() <= 2  # two fields of one object may be invalid
    with pytest.raises(InvalidRequest) as refused:
        parsed(model, raw)
    assert refused.value.field == field
    assert refused.value.__cause__ is None


class Inner(BaseModel):
    ids: list[int]


class Outer(BaseModel):
    prompt: list[int] | list[list[int]] | str = []
    inner: Inner | None = None


def test_all_routes_of_an_app_end_validation_at_the_first_error() -> None:
    application, api = FastAPI(), APIRouter()

    @api.post("/")
    async def route(body: Outer) -> Outer:
        return body

    application.include_router(api)
    fail_fast(application)
    client = TestClient(application)
    for body, most in (({"prompt": [1.5] * 1000}, 3), ({"inner": {"ids": ["x"] * 1000}}, 1)):
        answer = client.post("/", json=body)
        assert answer.status_code == 422
        assert 1 <= len(answer.json()["detail"]) <= most
    good = {"prompt": [[1], [2]], "inner": {"ids": [3]}}
    assert client.post("/", json=good).json() == good


@pytest.mark.parametrize("wrong", [1, [], None, {"a": 1}])
def test_a_validator_that_fails_on_another_type_refuses_the_body(wrong: Any) -> None:
    class Checked(BaseModel):
        limits: dict[str, int] = {}

        @model_validator(mode="before")
        @classmethod
        def check(cls, data: dict[str, Any]) -> dict[str, Any]:
            assert data["limits"].get("a") is None or data["limits"]["b"] > 0
            return data

    application = FastAPI()

    @application.post("/")
    async def echo(body: Checked) -> Checked:
        return body

    fail_fast(application)
    client = TestClient(application)
    answer = client.post("/", json={"limits": wrong})
    assert answer.status_code == 422
    assert client.post("/", json={"limits": {"c": 2}}).json() == {"limits": {"c": 2}}


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match=re.escape("items[1].idz: is unknown; remove it")):
        parsed(Items, b'{"items": [{}, {"idz": [1]}]}')
    assert Items.model_json_schema()["additionalProperties"] is False
    assert Items.model_json_schema()["$defs"]["Item"]["additionalProperties"] is False


@pytest.mark.parametrize("part", [b'"\\""', b"[]", b'"a"', b"{}", b'"\\\\"'])
def test_strings_arrays_and_objects_are_limited(part: bytes) -> None:
    def body(*counts: int) -> bytes:
        items = (b'{"anything":{"a":[' + b",".join([part] * count) + b"]}}" for count in counts)
        return b'{"items":[' + b",".join(items) + b"]" + b" " * INLINE_BYTES + b"}"

    many, around, each = 2_000, 3, 5  # strings, arrays and objects: in an item, around the items, and around these
    full = [many - each] * (MAX_JSON_PARTS // many - 1)
    parsed(Items, body(*full, many - each - around), "items")
    with pytest.raises(TooLarge, match=f"at most {MAX_JSON_PARTS} strings, arrays and objects; send less per request"):
        parsed(Items, body(*full, many - each - around + 1), "items")
    parsed(Items, body(MAX_PARTS_AT_ONCE - each, MAX_PARTS_AT_ONCE - each), "items")
    for at_once, items in ((body(1, MAX_PARTS_AT_ONCE - each + 1), "items"), (body(MAX_PARTS_AT_ONCE), None)):
        with pytest.raises(TooLarge, match=f"at most {MAX_PARTS_AT_ONCE} strings, arrays and objects in one prompt"):
            parsed(Items, at_once, items)


@pytest.mark.parametrize(
    ("old", "new"), [(b"]}", b",1]}"), (b"[", b"[1,"), (b"]}", b'],"rewards":1}'), (b"rewards", b"reward")]
)
def test_a_list_that_is_not_read_in_slices_must_be_short(old: bytes, new: bytes) -> None:
    item = b'{"trajectory_id":"%s","reward":0}' % (b"a" * 200)
    for count, error in ((MAX_PARTS_AT_ONCE // 5, InvalidRequest), (MAX_PARTS_AT_ONCE // 4, TooLarge)):
        text = b'{"rewards":[' + b",".join([item] * count) + b"]}"
        assert len(text) > INLINE_BYTES
        with pytest.raises(error) as refused:
            parsed(RewardsIn, text.replace(old, new, 1), "rewards")
        assert type(refused.value) is error


@pytest.mark.parametrize("name", [b'"r\\u0065wards"', b'"\\u0072\\u0065\\u0077\\u0061\\u0072\\u0064\\u0073"'])
def test_a_name_with_escapes_is_read_in_slices(name: bytes) -> None:
    text = b"{" + name + b":[" + b",".join([b'{"trajectory_id":"a","reward":0}'] * 3_000) + b"]}"
    assert len(parsed(RewardsIn, text, "rewards").rewards) == 3_000


@pytest.mark.parametrize("others", [[], [{"text": "b"}], 1])
@pytest.mark.parametrize("padding", [1, INLINE_BYTES])
def test_the_last_of_two_lists_counts_in_bodies_of_any_size(others: Any, padding: int) -> None:
    lists = [[{"text": "a" * padding}], others]
    for first, second in (lists, lists[::-1]):
        text = f'{{"prompts":{json.dumps(first)},"group_size":2,"prompts":{json.dumps(second)}}}'.encode()
        if second == 1:
            with pytest.raises(InvalidRequest, match="prompts: Input should be a valid"):
                parsed(RolloutsIn, text, "prompts")
        else:
            assert parsed(RolloutsIn, text, "prompts") == RolloutsIn.model_validate_json(text)


PROMPT = {"token_ids": list(range(1000))}


@pytest.mark.parametrize(
    "body",
    [
        {"prompts": [PROMPT] * 100, "group_size": 2},
        {"group_size": 2, "sampling": {"prompts": [{"text": "a"}]}, "prompts": [PROMPT] * 100, "budget": 3},
        {"prompts": [{"text": '"}], [{' * 1000, "metadata": {"prompts": [{}]}}] * 20, "group_size": 2},
        {"prompts": [{"messages": [{"role": "user", "content": "\\" * 999}, {"a": [{}]}]}] * 100, "group_size": 2},
        {"prompts": [], "group_size": 2, "sampling": {"stop": ["x" * INLINE_BYTES]}},
    ],
)
def test_a_list_that_is_read_in_slices_is_read_as_a_whole(body: dict[str, Any]) -> None:
    for text in (json.dumps(body).encode(), json.dumps(body, indent=3).encode()):
        assert len(text) > INLINE_BYTES
        assert parsed(RolloutsIn, text, "prompts") == RolloutsIn.model_validate_json(text)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (b'{"text":"last"}', b'{"text":1}', "prompts[100].text"),
        (b'{"text":"last"}', b'{"texts":"last"}', "prompts[100].texts"),
        (b'{"text":"last"}', b'{"text":"last"]', "body"),
        (b'{"text":"last"}', b'"last"', "prompts[100]"),
        (b'{"text":"last"}', b'{"text":"last"},', "body"),
        (b'{"text":"last"}]', b'{"text":"last"}}', "body"),
        (b'"group_size":2', b'"group_size":"2"', "group_size"),
        (b'"group_size":2}', b'"group_size":2', "body"),
    ],
)
def test_an_error_in_a_slice_names_its_field(old: bytes, new: bytes, field: str) -> None:
    body = {"prompts": [*[PROMPT] * 100, {"text": "last"}], "group_size": 2}
    text = json.dumps(body, separators=(",", ":")).encode()
    assert old in text
    with pytest.raises(InvalidRequest) as refused:
        parsed(RolloutsIn, text.replace(old, new), "prompts")
    assert refused.value.field == field


def test_deep_nesting_is_refused_in_an_item_too() -> None:
    with pytest.raises(InvalidRequest, match="recursion limit"):
        parsed(Items, b'{"items":[{"anything":{"a":' + b"[" * 4_000)
    text = json.dumps({"prompts": [PROMPT] * 100, "group_size": 2}).encode()
    with pytest.raises(InvalidRequest, match=r"^prompts\[0\]: Invalid JSON: recursion limit exceeded$"):
        parsed(RolloutsIn, text.replace(b"[0,", b"[" + b"[" * 250 + b"]" * 250 + b",", 1), "prompts")


TEXTS = st.text(st.sampled_from('a"\\[]{},: é'), max_size=5)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**63), 2**63), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.just("items"), inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@given(st.lists(OBJECTS, max_size=5), OBJECTS, OBJECTS, st.sampled_from([None, 2]))
def test_each_object_of_a_list_is_found(
    items: list[Any], before: dict[str, Any], after: dict[str, Any], indent: int | None
) -> None:
    whole = before | {"items": items} | after
    split = split_objects(json.dumps(whole, indent=indent).encode(), "items")
    assert split is not None
    assert json.loads(split[0]) == whole | {"items": []}
    assert [json.loads(text) for text in split[1]] == items


@given(VALUES)
def test_what_is_no_list_of_objects_is_not_split(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        assert split_objects(json.dumps({"a": 1, "items": value}).encode(), "items") is None
    assert split_objects(json.dumps([{"items": [{}]}]).encode(), "items") is None
    assert split_objects(json.dumps({"a": {"items": [value]}}).encode(), "items") is None


@given(st.binary(max_size=30), st.sampled_from([b"", b'{"items":[', b'{"items":[{}', b'{"\xff":1,"items":[{}]}']))
def test_any_bytes_are_read_to_their_end(text: bytes, before: bytes) -> None:
    with suppress(InvalidRequest):
        split_objects(before + text, "items")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1 2"])
def test_a_large_body_that_is_no_json_is_not_refused_as_too_large(number: str) -> None:
    rewards = b",".join([b'{"trajectory_id":"a","reward":0}'] * 3_000)
    text = b'{"rewards":[' + rewards + b',{"trajectory_id":"a","reward":%s}]}' % number.encode()
    with pytest.raises(InvalidRequest, match=r"^body: is no JSON: .*\(byte 9\d+\)$"):
        parsed(RewardsIn, text, "rewards")


@pytest.mark.parametrize("place", ['{"items":[{%s}]}', '{"items":[{}],%s}'])
def test_names_are_counted_before_they_become_objects(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ",".join(f'"{number}":1' for number in range(MAX_PARTS_AT_ONCE + 1))
    if place.endswith("%s}"):  # it would be encoded without the list, all of its names in a dict
        monkeypatch.setattr(msgspec.json, "encode", Mock(side_effect=AssertionError))
    with pytest.raises(TooLarge, match=f"at most {MAX_PARTS_AT_ONCE} strings"):
        parsed(Items, (place % names).encode(), "items")


@pytest.mark.parametrize(
    "inner", ["x" * 200_000, '\\"' * 70_000, "x" * 65_500 + '"\\' * 50 + "[" * 10, '[{\\"' * MAX_JSON_PARTS]
)
def test_a_string_may_be_longer_than_a_window_and_what_is_in_it_does_not_count(inner: str) -> None:
    text = json.dumps({"items": [{"anything": {"a": inner}}] * 2}).encode()
    assert [item.anything for item in parsed(Items, text, "items").items] == [{"a": inner}] * 2


class FewItems(Body):
    items: list[Item] = Field(max_length=2)


def test_the_length_of_a_list_that_is_read_in_slices_is_limited() -> None:
    text = json.dumps({"items": [{"anything": {"a": "x" * INLINE_BYTES}}] * 3}).encode()
    with pytest.raises(InvalidRequest, match="at most 2 items after validation, not 3"):
        parsed(FewItems, text, "items")


def test_numbers_that_are_parsed_at_once_are_limited() -> None:
    many = b"1," * MAX_VALUES_AT_ONCE + b"1,1"
    for text in (
        b'{"group_size":2,"prompts":[{"token_ids":[%b]}]}',
        b'{"group_size":2,"prompts":[{"text":"a"}],"sampling":{"a":[%b]}}',
    ):
        with pytest.raises(TooLarge, match=f"at most {MAX_VALUES_AT_ONCE} numbers"):
            parsed(RolloutsIn, text % many, "prompts")
    text = json.dumps({"group_size": 2, "prompts": [{"text": "," * (MAX_VALUES_AT_ONCE + 2)}]}).encode()
    assert parsed(RolloutsIn, text, "prompts").prompts


def metadata(text: bytes) -> bytes:
    return b'{"group_size":2,"prompts":[{"text":"a","metadata":{"a":[%b]}}]}' % text


def test_digits_of_a_number_are_limited() -> None:
    whole = b"7" * MAX_DIGITS
    assert parsed(RolloutsIn, metadata(b",".join([whole, b"-" + whole, b"0." + whole])), "prompts").prompts
    for number in (b"7" * (MAX_DIGITS + 1), b"-0." + b"7" * (MAX_DIGITS + 1), b"7" * 4301, b"7" * 10**6):
        with pytest.raises(InvalidRequest, match="body: has a number of more than 500 digits; send it as a string"):
            parsed(RolloutsIn, metadata(b"1," * 99 + number), "prompts")
    in_strings = json.dumps({"a": "7" * 10**6, "b": '"' + "7" * 600 + "\\"}).encode()
    assert parsed(RolloutsIn, metadata(in_strings), "prompts").prompts


@given(
    st.lists(st.sampled_from(["7" * n for n in (1, 249, 250, 499, 500, 501, 502, 751)] + [",", '"7,7"', "[", "]", "."]))
)
def test_a_long_number_is_found_wherever_it_is(parts: list[str]) -> None:
    text = "".join(parts)
    outside = re.sub('"[^"]*"', '"', text)
    with pytest.raises(InvalidRequest) as refused:  # the text is no JSON object
        parsed(Items, text.encode())
    assert ("digits" in str(refused.value)) == any(len(run) > MAX_DIGITS for run in re.findall("[0-9]+", outside))


def test_what_is_parsed_at_once_outside_of_strings_is_limited() -> None:
    numbers = b",".join([b"7" * MAX_DIGITS] * (MAX_UNQUOTED_AT_ONCE // MAX_DIGITS))
    with pytest.raises(TooLarge, match=f"at most {MAX_UNQUOTED_AT_ONCE} bytes outside strings in one prompt"):
        parsed(RolloutsIn, metadata(numbers), "prompts")
    text = json.dumps({"group_size": 2, "prompts": [{"text": " " * (MAX_UNQUOTED_AT_ONCE + 1)}]}).encode()
    assert parsed(RolloutsIn, text, "prompts").prompts


async def test_the_event_loop_is_served_while_a_large_body_is_parsed() -> None:
    text = json.dumps({"prompts": [{"token_ids": list(range(8192))}] * 100, "group_size": 2}).encode()
    longest, last = 0.0, time.process_time()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await anyio.sleep(0.001)
            longest, last = max(longest, time.process_time() - last), time.process_time()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await anyio.sleep(0.01)
        began = time.process_time()
        assert len((await parse_body(RolloutsIn, text, "prompts")).prompts) == 100
        parsing = time.process_time() - began
        tasks.cancel_scope.cancel()
    assert longest < max(parsing / 3, 0.05)  # of the processor's time: the machine may be busy with something else


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 1_000_000 + b"[" * 600_000, b'"' * 1_200_000 + b'"a'])
def test_counting_takes_linear_time(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        parsed(Items, body)
    assert time.process_time() - began < 5
