from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.http.headers import read_options
from darts_server.types import RequestOptions
from darts_server.vllm.requests import attach, current_options, merged_policy, with_raw_names


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Serving:
    """A handler as vLLM's routes have them; notes what was known when it ran."""

    def __init__(self) -> None:
        self.seen: list[RequestOptions] = []

    async def create_completion(self, request: Any, raw_request: Any = None) -> str:
        self.seen.append(current_options())
        return "answer"


@pytest.mark.anyio
async def test_a_handler_sees_what_its_own_request_asked_for() -> None:
    serving = Serving()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset({"tiny:raw"}))
    asked = SimpleNamespace(headers={"X-Darts-Policy": "uniform"})
    plain = SimpleNamespace(headers={})
    assert await serving.create_completion(SimpleNamespace(model="tiny"), asked) == "answer"
    await serving.create_completion(SimpleNamespace(model="tiny"), plain)
    await serving.create_completion(SimpleNamespace(model="tiny:raw"), asked)
    await serving.create_completion(SimpleNamespace(model=None))
    assert [options.policy for options in serving.seen] == ["uniform", None, "off", None]
    assert current_options().policy is None


@pytest.mark.anyio
async def test_a_malformed_header_never_reaches_the_handler() -> None:
    serving = Serving()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    with pytest.raises(InvalidRequest):
        await serving.create_completion(SimpleNamespace(model="tiny"), SimpleNamespace(headers={"x-darts-foo": "1"}))
    assert serving.seen == []


@pytest.mark.parametrize(
    ("header", "xargs", "policy"),
    [
        (None, {}, None),
        ("off", {}, "off"),
        (None, {"darts_policy": "off"}, "off"),
        ("off", {"darts_policy": "off", "other": 3}, "off"),
    ],
)
def test_header_and_body_name_the_policy_alike(header: str | None, xargs: dict[str, Any], policy: str | None) -> None:
    assert merged_policy(RequestOptions(header), xargs) == policy


@pytest.mark.parametrize(
    ("header", "xargs", "words"),
    [
        ("off", {"darts_policy": "uniform"}, "contradicts"),
        (None, {"darts_policy": 3}, "must be the name"),
        (None, {"darts_polcy": "off"}, "unknown"),
    ],
)
def test_contradictions_and_misspellings_are_refused(header: str | None, xargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        merged_policy(RequestOptions(header), xargs)


def test_raw_names_come_after_the_served_ones_so_that_the_first_model_is_the_shaped_one() -> None:
    assert with_raw_names(["a", "b"]) == ["a", "b", "a:raw", "b:raw"]
