import json
from threading import get_ident
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from darts_server.exceptions import InvalidRequest, TooLarge
from darts_server.http import errors
from darts_server.http.body import INLINE_BYTES, MAX_PARTS_AT_ONCE, MAX_VALUES_AT_ONCE, BodyLimits
from darts_server.http.security import json_bodies
from darts_server.http.security.access import Access
from darts_server.http.security.json_bodies import MAX_NUMBERS, limit_json, load_json
from darts_server.http.security.middleware import SecurityMiddleware
from tests.http.serving import HERE, LARGEST, URL

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
LONG = "x" * INLINE_BYTES
PROMPTS = [list(range(8_192))] * 512


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "tiny", "prompt": [[1, 2], [], [3.5, null, true, "a"]]}',
        '{"prompt": [[1], 2, [3]], "prompt": "the last one counts"}',
        '{"a": NaN, "b": [[Infinity]], "c": 1e400, "d": 123456789012345678901234567890}',
        '{"a": "\\ud800", "\\"[[[": "日本", "b": [["\\ud800"]]}',
        '[1, {"a": [["b"]]}]',
        '"text"',
        "\ufeff{}",
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_json_is_read_as_pythons_own_parser_does(text: str, is_large: bool) -> None:
    if is_large:
        text = text.replace("{", f'{{"long": "{LONG}", ', 1) if '{"' in text else text + " " * INLINE_BYTES
    body = text.encode()
    assert repr(load_json(body, MAX_PARTS_AT_ONCE)) == repr(json.loads(body))


@pytest.mark.parametrize("text", ["", "{", '{"a": [[1, ]]}', '{"a": [[1], [2]}', "{} {}", '{"a": "\n"}', '{"a": 01}'])
@pytest.mark.parametrize("after", [b"", b" " * INLINE_BYTES])
def test_a_text_that_is_no_json_is_an_error(text: str, after: bytes) -> None:
    with pytest.raises(ValueError, match="line"):
        load_json(text.encode() + after, MAX_PARTS_AT_ONCE)


def test_the_batches_of_trainers_are_read() -> None:
    body = json.dumps({"model": "tiny", "prompt": PROMPTS, "n": 8}).encode()
    assert load_json(body, MAX_PARTS_AT_ONCE)["prompt"] == PROMPTS


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"messages": [%b]}' % b",".join([b'{"role": "user", "content": "a"}'] * 20_000), f"{MAX_PARTS_AT_ONCE} str"),
        (b'{"stop": [%b]}' % b",".join([b'"a"'] * (MAX_PARTS_AT_ONCE + 1)), f"{MAX_PARTS_AT_ONCE} strings"),
        (b'{"prompt": [%b]}' % b",".join([b"5"] * (MAX_VALUES_AT_ONCE + 2)), f"{MAX_VALUES_AT_ONCE} numbers in one"),
        (b'{"prompt": [[%b], [1]]}' % b",".join([b"5"] * (MAX_VALUES_AT_ONCE + 2)), "numbers in one prompt"),
        (b'{"prompt": [[%b]]}' % b"],[".join([b"5" + b",5" * 999] * 8_500), f"{MAX_NUMBERS} numbers in all"),
        (b'{"prompt": [%b1, [2]]}' % b"[1], 5, ".join([b"5"] * 200_000), "numbers|strings"),
        (json.dumps({"a": "b" * 300}).encode("utf-16"), "must be UTF-8"),
    ],
    ids=["messages", "texts", "flat", "one", "many", "mixed", "encoding"],
)
def test_bodies_that_take_long_to_parse_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        load_json(body, MAX_PARTS_AT_ONCE)
    assert caught.value.field == "body"
    assert isinstance(caught.value, TooLarge) or "UTF-8" in message


def test_routes_for_use_take_fewer_parts_than_routes_for_admins_and_large_bodies_are_read_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def read(body: bytes, most_parts: int) -> Any:
        threads.append(get_ident())
        return load_json(body, most_parts)

    monkeypatch.setattr(json_bodies, "load_json", read)
    application = FastAPI()
    errors.install_handlers(application)

    @application.post("/v1/chat/completions")
    async def use(body: dict[str, Any]) -> list[int]:
        return [get_ident(), len(body["names"])]

    @application.post("/update_weights")
    async def change(request: Request) -> list[int]:
        return [get_ident(), len((await request.json())["names"])]

    limit_json(application)
    application.add_middleware(SecurityMiddleware, access=Access(), limits=BodyLimits(LARGEST), on_refusal=Mock())
    few = {"names": ["a"]}
    many = {"names": ["model.layers.0.mlp.weight"] * (MAX_PARTS_AT_ONCE + 1)}
    with TestClient(application, URL, client=(HERE, 1)) as client:
        loop, _ = client.post("/v1/chat/completions", json=few).json()
        assert client.post("/update_weights", json=many).json() == [loop, MAX_PARTS_AT_ONCE + 1]
        refused = client.post("/v1/chat/completions", json=many)
        assert client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}).is_error
    assert refused.status_code == 413
    assert refused.json()["error"]["param"] == "body"
    assert [thread == loop for thread in threads] == [True, False, False, True]
