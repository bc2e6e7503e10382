from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.headers import read_options
from darts_server.types import RequestOptions
from darts_server.vllm.requests import add_demand, attach, current_options, with_raw_names


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


def test_raw_names_come_after_the_served_ones_so_that_the_first_model_is_the_shaped_one() -> None:
    assert with_raw_names(["a", "b"]) == ["a", "b", "a:raw", "b:raw"]


@pytest.mark.anyio
@pytest.mark.parametrize(("more", "told"), [({}, [8, 16, 24]), ({"use_beam_search": True}, [8, 0, 0])])
async def test_what_a_request_asks_for_adds_up_over_its_prompts_and_a_beam_search_asks_once(
    more: dict[str, Any], told: list[int]
) -> None:
    class Prompts:
        async def create_completion(self, request: Any, raw_request: Any = None) -> list[int]:
            return [add_demand(8) for _ in range(3)]

    serving = Prompts()
    attach(State({"openai_serving_completion": serving}), read_options, frozenset())
    for _ in range(2):
        assert await serving.create_completion(SimpleNamespace(model="tiny", **more)) == told


def test_outside_a_known_handler_each_prompt_stands_for_itself() -> None:
    assert [add_demand(8), add_demand(8)] == [8, 8]
