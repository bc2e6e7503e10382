"""Requests of batches as the objects that run."""

import json
from typing import Any

from darts_server.http.body import parsed
from darts_server.http.resources.rollouts_models import RolloutsIn

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def chat_options(prompts: list[dict[str, Any]], **shared: Any) -> list[bytes | None]:
    body = {"prompts": prompts, "group_size": 2} | shared
    return [prompt.chat_options for prompt in parsed(RolloutsIn, json.dumps(body).encode()).request().prompts]


def test_all_chats_of_a_batch_have_its_options_as_one_object() -> None:
    tools = [{"type": "function", "function": {"name": "a" * 1000}}]
    first, text, second = chat_options([CHAT, {"text": "b"}, CHAT], tools=tools, add_generation_prompt=False)
    assert first is not None
    assert first is second, "a batch must not take the memory of its options for every prompt"
    assert json.loads(first) == {"tools": tools, "add_generation_prompt": False}
    assert text is None
    assert chat_options([CHAT]) == [None]


def test_a_prompts_options_come_before_the_batchs_and_template_arguments_each_by_itself() -> None:
    own = {"tools": [{"b": 2}], "chat_template_kwargs": {"x": 2**70, "y": None}, "continue_final_message": False}
    shared = {"tools": [{"a": 1}], "chat_template_kwargs": {"x": 1, "y": 1, "z": True}}
    [options] = chat_options([CHAT | own], **shared)
    assert options is not None
    assert json.loads(options) == own | {"chat_template_kwargs": {"x": 2**70, "y": None, "z": True}}
