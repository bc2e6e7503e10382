import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from darts_server.exceptions import InvalidRequest, TooLarge
from darts_server.http import body as body_module
from darts_server.http.body import (
    INLINE_BYTES,
    AnyObject,
    Body,
    check_structure,
    parse,
    parse_body,
    read_body,
    split_list,
    stream_body,
)
from darts_server.http.resources.rewards import RewardsIn
from darts_server.http.resources.rollouts_models import RolloutsIn
from darts_server.http.resources.vote import VoteIn

pytestmark = pytest.mark.anyio
MAX_ITEMS = 20_000
MAX_PARTS_AT_ONCE = 5_000
MAX_VALUES_AT_ONCE = 150_000
"""Smaller than the server's limits, so that the tests are fast."""


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAX_ITEMS", "MAX_PARTS_AT_ONCE", "MAX_VALUES_AT_ONCE"):
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
        await anext(stream_body(request, 10, stall_seconds=0.01))


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
    # Two fields of one object may be invalid.
    assert invalid.value.error_count() <= 2
    with pytest.raises(InvalidRequest) as refused:
        parse(model, raw)
    assert refused.value.field == field
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(("name", "remedy"), [("idz", "write ids"), ("colour", "remove it"), ("x" * 1000, "remove it")])
def test_an_unknown_field_is_named_with_the_nearest_name(name: str, remedy: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(Items, b'{"items": [{}, {"%b": [1]}]}' % name.encode())
    assert str(refused.value) == f"items[1].{name[:100]}: is unknown; {remedy}"
    assert Items.model_json_schema()["additionalProperties"] is False
    assert Items.model_json_schema()["$defs"]["Item"]["additionalProperties"] is False


@pytest.mark.parametrize("part", [b'"\\""', b"[]", b'"a"', b"{}", b'"\\\\"'])
def test_strings_arrays_and_objects_are_limited(part: bytes) -> None:
    def body(*counts: int) -> bytes:
        items = (b'{"anything":{"a":[' + b",".join([part] * count) + b"]}}" for count in counts)
        return b'{"items":[' + b",".join(items) + b"]" + b" " * INLINE_BYTES + b"}"

    around_items = 3
    around_parts = 5
    parse(Items, body(*[MAX_PARTS_AT_ONCE - around_parts] * 3), "items")
    parse(Items, body(MAX_PARTS_AT_ONCE - around_parts - around_items))
    for at_once, items in (
        (body(1, MAX_PARTS_AT_ONCE - around_parts + 1), "items"),
        (body(MAX_PARTS_AT_ONCE - around_parts - around_items + 1), None),
    ):
        with pytest.raises(TooLarge, match=f"at most {MAX_PARTS_AT_ONCE} strings, arrays and objects in one prompt"):
            parse(Items, at_once, items)


def test_items_of_a_list_are_limited() -> None:
    body = b'{"items":[' + b",".join([b'{"ids":[]}'] * MAX_ITEMS) + b"]}"
    assert len(parse(Items, body, "items").items) == MAX_ITEMS
    with pytest.raises(TooLarge, match=f"at most {MAX_ITEMS} items in a list"):
        parse(Items, body.replace(b"[", b"[{},", 1), "items")


@pytest.mark.parametrize(
    ("old", "new"), [(b"]}", b",1]}"), (b"[", b"[1,"), (b"]}", b'],"rewards":1}'), (b"rewards", b"reward")]
)
def test_a_list_that_is_not_only_objects_must_be_short(old: bytes, new: bytes) -> None:
    item = b'{"trajectory_id":"%s","reward":0}' % (b"a" * 200)
    for count, error in ((MAX_PARTS_AT_ONCE // 5, InvalidRequest), (MAX_PARTS_AT_ONCE // 4, TooLarge)):
        text = b'{"rewards":[' + b",".join([item] * count) + b"]}"
        assert len(text) > INLINE_BYTES
        with pytest.raises(error) as refused:
            parse(RewardsIn, text.replace(old, new, 1), "rewards")
        assert type(refused.value) is error


@pytest.mark.parametrize("name", [b'"r\\u0065wards"', b'"\\u0072\\u0065\\u0077\\u0061\\u0072\\u0064\\u0073"'])
def test_a_name_with_escapes_is_found(name: bytes) -> None:
    text = b"{" + name + b":[" + b",".join([b'{"trajectory_id":"a","reward":0}'] * 3_000) + b"]}"
    assert len(parse(RewardsIn, text, "rewards").rewards) == 3_000


@pytest.mark.parametrize("others", [[], [{"text": "b"}], 1])
@pytest.mark.parametrize("padding", [1, INLINE_BYTES])
def test_the_last_of_two_lists_counts_in_bodies_of_any_size(others: Any, padding: int) -> None:
    lists = [[{"text": "a" * padding}], others]
    for first, second in (lists, lists[::-1]):
        text = f'{{"prompts":{json.dumps(first)},"group_size":2,"prompts":{json.dumps(second)}}}'.encode()
        if second == 1:
            with pytest.raises(InvalidRequest, match="prompts: Input should be a valid"):
                parse(RolloutsIn, text, "prompts")
        else:
            assert parse(RolloutsIn, text, "prompts") == RolloutsIn.model_validate_json(text)


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
def test_a_list_whose_items_are_parsed_one_by_one_equals_the_list_parsed_at_once(body: dict[str, Any]) -> None:
    for text in (json.dumps(body).encode(), json.dumps(body, indent=3).encode()):
        assert len(text) > INLINE_BYTES
        assert parse(RolloutsIn, text, "prompts") == RolloutsIn.model_validate_json(text)


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
def test_an_error_in_an_item_names_its_field(old: bytes, new: bytes, field: str) -> None:
    body = {"prompts": [*[PROMPT] * 100, {"text": "last"}], "group_size": 2}
    text = json.dumps(body, separators=(",", ":")).encode()
    assert old in text
    with pytest.raises(InvalidRequest) as refused:
        parse(RolloutsIn, text.replace(old, new), "prompts")
    assert refused.value.field == field


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="recursion limit"):
        parse(Items, b'{"items":[{"anything":{"a":' + b"[" * 4_000)
    text = json.dumps({"prompts": [PROMPT] * 100, "group_size": 2}).encode()
    with pytest.raises(InvalidRequest, match=r"^prompts\[0\]: Invalid JSON: recursion limit exceeded$"):
        parse(RolloutsIn, text.replace(b"[0,", b"[" + b"[" * 250 + b"]" * 250 + b",", 1), "prompts")


TEXTS = st.text(st.sampled_from('a"\\[]{},: é'), max_size=5)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**63), 2**63), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.just("items"), inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@given(st.lists(OBJECTS, max_size=5), st.sampled_from([None, 2]))
def test_each_object_of_a_list_is_found(items: list[Any], indent: int | None) -> None:
    texts = split_list(json.dumps(items, indent=indent).encode(), AnyObject)
    assert texts is not None
    assert [json.loads(text) for text in texts] == items


@given(VALUES)
def test_only_a_list_of_objects_is_split(value: Any) -> None:
    is_list_of_objects = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    assert (split_list(json.dumps(value).encode(), AnyObject) is not None) == is_list_of_objects


@given(st.binary(max_size=30), st.sampled_from([b"", b'{"items":[', b'{"items":[{}', b'{"\xff":1,"items":[{}]}']))
def test_any_bytes_are_parsed_or_refused(text: bytes, before: bytes) -> None:
    for padding in (b"", b" " * INLINE_BYTES):
        with suppress(InvalidRequest):
            parse(Items, before + text + padding, "items")


@given(VALUES)
def test_the_structure_is_counted_outside_of_strings(value: Any) -> None:
    def count(value: Any) -> tuple[int, int]:
        """Return the numbers of parts and of commas."""
        if isinstance(value, str):
            return 1, 0
        if not isinstance(value, list | dict):
            return 0, 0
        inner = [count(item) for item in value]
        if isinstance(value, dict):
            inner += [count(item) for item in value.values()]
        return 1 + sum(parts for parts, _ in inner), max(0, len(value) - 1) + sum(commas for _, commas in inner)

    text = json.dumps(value).encode()
    parts, commas = count(value)
    check_structure(text, parts, commas, "in all")
    for fewer_parts, fewer_commas in ((parts - 1, commas), (parts, commas - 1)):
        with pytest.raises(TooLarge):
            check_structure(text, fewer_parts, fewer_commas, "in all")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1 2"])
def test_a_large_body_that_is_no_json_is_not_refused_as_too_large(number: str) -> None:
    rewards = b",".join([b'{"trajectory_id":"a","reward":0}'] * 3_000)
    text = b'{"rewards":[' + rewards + b',{"trajectory_id":"a","reward":%s}]}' % number.encode()
    with pytest.raises(InvalidRequest, match=r"^body: is no JSON: .*\(byte 9\d+\)$"):
        parse(RewardsIn, text, "rewards")


@pytest.mark.parametrize(
    "inner", ["x" * 200_000, '\\"' * 70_000, "x" * 65_500 + '"\\' * 50 + "[" * 10, '[{\\"' * MAX_PARTS_AT_ONCE]
)
def test_the_content_of_a_string_does_not_count(inner: str) -> None:
    text = json.dumps({"items": [{"anything": {"a": inner}}] * 2}).encode()
    assert [item.anything for item in parse(Items, text, "items").items] == [{"a": inner}] * 2


class FewItems(Body):
    items: list[Item] = Field(max_length=2)


def test_the_length_of_a_list_whose_items_are_parsed_one_by_one_is_limited() -> None:
    text = json.dumps({"items": [{"anything": {"a": "x" * INLINE_BYTES}}] * 3}).encode()
    with pytest.raises(InvalidRequest, match="at most 2 items after validation, not 3"):
        parse(FewItems, text, "items")


def test_numbers_that_are_parsed_at_once_are_limited() -> None:
    many = b"1," * MAX_VALUES_AT_ONCE + b"1,1"
    for text in (
        b'{"group_size":2,"prompts":[{"token_ids":[%b]}]}',
        b'{"group_size":2,"prompts":[{"text":"a"}],"sampling":{"a":[%b]}}',
    ):
        with pytest.raises(TooLarge, match=f"at most {MAX_VALUES_AT_ONCE} numbers"):
            parse(RolloutsIn, text % many, "prompts")
    text = json.dumps({"group_size": 2, "prompts": [{"text": "," * (MAX_VALUES_AT_ONCE + 2)}]}).encode()
    assert parse(RolloutsIn, text, "prompts").prompts


@pytest.mark.parametrize("number", [b"7" * 4301, b"7" * 10**6])
def test_a_number_of_too_many_digits_is_refused(number: bytes) -> None:
    text = b'{"group_size":2,"prompts":[{"text":"a","metadata":{"a":[1,%b]}}]}' % number
    with pytest.raises(InvalidRequest, match="number out of range"):
        parse(RolloutsIn, text, "prompts")


async def test_the_event_loop_is_served_while_a_large_body_is_parsed() -> None:
    text = json.dumps({"prompts": [{"token_ids": list(range(8192))}] * 100, "group_size": 2}).encode()
    longest = 0.0
    last = time.process_time()

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
    # Processor time, because the machine may be busy with other programs.
    assert longest < max(parsing / 3, 0.05)


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 1_000_000 + b"[" * 600_000, b'"' * 1_200_000 + b'"a'])
def test_the_structure_is_checked_in_linear_time(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        parse(Items, body)
    assert time.process_time() - began < 5
