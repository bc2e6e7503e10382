from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.headers import read_options
from darts_server.types import RequestOptions
from darts_server.vllm.requests import attach, current_options, demanded, merged, with_raw_names


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
    asked = SimpleNamespace(headers={"X-Darts-Policy": "uniform", "X-Darts-Prompt-Key": "p"})
    plain = SimpleNamespace(headers={})
    assert await serving.create_completion(SimpleNamespace(model="tiny"), asked) == "answer"
    await serving.create_completion(SimpleNamespace(model="tiny"), plain)
    await serving.create_completion(SimpleNamespace(model="tiny:raw"), asked)
    await serving.create_completion(SimpleNamespace(model=None))
    assert [options.policy for options in serving.seen] == ["uniform", None, "off", None]
    assert [options.prompt_key for options in serving.seen] == ["p", None, "p", None]
    assert current_options().policy is None


@pytest.mark.anyio
async def test_a_malformed_header_never_reaches_the_handler() -> None:
    serving = Serving()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    with pytest.raises(InvalidRequest):
        await serving.create_completion(SimpleNamespace(model="tiny"), SimpleNamespace(headers={"x-darts-foo": "1"}))
    assert serving.seen == []


@pytest.mark.parametrize(
    ("header", "xargs", "both"),
    [
        (RequestOptions(), {}, RequestOptions()),
        (RequestOptions("off"), {"other": 3}, RequestOptions("off")),
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
    assert merged(header, xargs) == both


@pytest.mark.parametrize(
    ("header", "xargs", "words"),
    [
        (RequestOptions("off"), {"darts_policy": "uniform"}, "darts_policy: 'uniform' contradicts 'off' of the header"),
        (RequestOptions(None, "p"), {"darts_prompt_key": "q"}, "contradicts 'p' of the header X-Darts-Prompt-Key"),
        (RequestOptions(group_id="a"), {"darts_group_id": "b"}, "contradicts 'a' of the header X-Darts-Group"),
        (RequestOptions(group_size=8), {"darts_group_size": 4}, "darts_group_size: 4 contradicts 8 of the header"),
        (RequestOptions(), {"darts_policy": 3}, "vllm_xargs.darts_policy: must be the name"),
        (RequestOptions(), {"darts_prompt_key": 7}, "vllm_xargs.darts_prompt_key: must be a key"),
        (RequestOptions(), {"darts_group_id": "a;b"}, "vllm_xargs.darts_group_id: must be an id"),
        (RequestOptions(), {"darts_group_size": 0}, "from 1 to 16384, got 0"),
        (RequestOptions(), {"darts_group_size": [8]}, "whole number"),
        (RequestOptions(), {"darts_polcy": "off"}, "unknown; known ones are darts_policy, darts_prompt_key"),
    ],
)
def test_contradictions_and_misspellings_are_refused(header: RequestOptions, xargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        merged(header, xargs)


def test_raw_names_come_after_the_served_ones_so_that_the_first_model_is_the_shaped_one() -> None:
    assert with_raw_names(["a", "b"]) == ["a", "b", "a:raw", "b:raw"]


@pytest.mark.anyio
@pytest.mark.parametrize(("more", "told"), [({}, [8, 16, 24]), ({"use_beam_search": True}, [8, 0, 0])])
async def test_what_a_request_asks_for_adds_up_over_its_prompts_and_a_beam_search_asks_once(
    more: dict[str, Any], told: list[int]
) -> None:
    class Prompts:
        async def create_completion(self, request: Any, raw_request: Any = None) -> list[int]:
            return [demanded(8) for _ in range(3)]

    serving = Prompts()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    for _ in range(2):
        assert await serving.create_completion(SimpleNamespace(model="tiny", **more)) == told


def test_outside_a_known_handler_each_prompt_stands_for_itself() -> None:
    assert [demanded(8), demanded(8)] == [8, 8]
