"""Requests of batches as the objects that run."""

import json
from typing import Any

from darts_server.http.body import parse
from darts_server.http.resources.rollouts_models import RolloutsIn

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def chat_options(prompts: list[dict[str, Any]], **shared: Any) -> list[bytes | None]:
    body = {"prompts": prompts, "group_size": 2} | shared
    return [prompt.chat_options for prompt in parse(RolloutsIn, json.dumps(body).encode()).request().prompts]


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
