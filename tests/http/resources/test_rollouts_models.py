"""Requests of batches as the objects that run."""

import json
from typing import Any

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import parse
from darts_server.http.resources.rollouts_models import RolloutsIn

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def chat_options(prompts: list[dict[str, Any]], **shared: Any) -> list[bytes | None]:
    body = {"prompts": prompts, "group_size": 2} | shared
    return [prompt.chat_options for prompt in parse(RolloutsIn, json.dumps(body).encode()).to_batch_request().prompts]


def test_chats_of_a_batch_share_one_object_of_options() -> None:
    tools = [{"type": "function", "function": {"name": "a" * 1000}}]
    first, text, second = chat_options([CHAT, {"text": "b"}, CHAT], tools=tools, add_generation_prompt=False)
    assert first is not None
    assert first is second, "a batch must not take the memory of its options for every prompt"
    assert json.loads(first) == {"tools": tools, "add_generation_prompt": False}
    assert text is None
    assert chat_options([CHAT]) == [None]


def test_options_and_template_arguments_of_a_prompt_override_the_batchs() -> None:
    own = {"tools": [{"b": 2}], "chat_template_kwargs": {"x": 2**70, "y": None}, "continue_final_message": False}
    shared = {"tools": [{"a": 1}], "chat_template_kwargs": {"x": 1, "y": 1, "z": True}}
    [options] = chat_options([CHAT | own], **shared)
    assert options is not None
    assert json.loads(options) == own | {"chat_template_kwargs": {"x": 2**70, "y": None, "z": True}}


@pytest.mark.parametrize("verifier", ["compute_score", True, [], [1], {}])
def test_the_error_for_verifiers_says_what_the_field_must_be(verifier: Any) -> None:
    message = 'must be false or a list of names, such as ["compute_score"]'
    with pytest.raises(InvalidRequest) as of_batch:
        chat_options([CHAT], verifier=verifier)
    assert (of_batch.value.field, of_batch.value.message) == ("verifier", message)
    with pytest.raises(InvalidRequest) as of_prompt:
        chat_options([CHAT, CHAT | {"verifier": verifier}])
    assert (of_prompt.value.field, of_prompt.value.message) == ("prompts[1].verifier", message)


def test_the_error_for_only_has_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r'^only: must be "informative"; omit it to return all groups$'):
        chat_options([CHAT], only="mixed")
