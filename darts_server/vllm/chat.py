"""Read the chat of vLLM's requests, and the messages of its answers."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from darts_server.rollout.turns.chat_history import ChatHistory, Message


def is_response_request(request: Any) -> bool:
    """Whether a request is one of the Responses API, whose chat is a list of items."""
    return hasattr(request, "input") and hasattr(request, "previous_response_id")


def read_history(request: Any, caller: str = "") -> ChatHistory | None:
    """Read the chat of a request; ``None`` without one. ``caller``: the key's name."""
    if is_response_request(request):
        items = request.input
        chat = list(_from_harmony(getattr(request, "previous_input_messages", None) or ()))
        chat += [{"role": "user", "content": items}] if isinstance(items, str) else _to_messages(items)
        return ChatHistory(chat, caller, follows=request.previous_response_id is not None)
    messages = getattr(request, "messages", None)
    if not isinstance(messages, list) or not all(isinstance(message, MutableMapping) for message in messages):
        return None
    for message in messages:
        _make_lists(message)
    return ChatHistory(messages, caller)


def answered_messages(answer: Any) -> Iterable[Message]:
    """The messages of a chat's answer that is not streamed. Of a response's items the first stands for all."""
    if isinstance(items := getattr(answer, "output", None), list):
        return list(_to_messages(items))[:1]
    messages = (getattr(choice, "message", None) for choice in getattr(answer, "choices", None) or ())
    return [message.model_dump() for message in messages if message is not None]


def _to_messages(items: Iterable[Any]) -> Iterator[Message]:
    """Convert items of the Responses API to messages. Callers may drop reasoning, so it is left out."""
    for item in items:
        fields = item.model_dump() if hasattr(item, "model_dump") else item
        match fields:
            case {"type": "function_call"}:
                yield {"role": "assistant", "tool_calls": [{"function": fields}]}
            case {"type": "function_call_output"}:
                yield {"role": "tool", "content": fields.get("output")}
            case {"role": _}:
                if isinstance(fields, MutableMapping):
                    _make_lists(fields)
                yield fields


def _from_harmony(messages: Iterable[Any]) -> Iterator[Message]:
    """Convert the earlier messages of a request for a Harmony model. Reasoning is left out here too.

    vLLM takes none of those with instructions, but for the request's own.
    """
    for message in messages:
        fields = message.model_dump() if hasattr(message, "model_dump") else message
        author = fields.get("author")
        role = author.get("role") if isinstance(author, Mapping) else fields.get("role")
        if role not in ("system", "developer") and fields.get("channel") != "analysis":
            yield {
                "role": getattr(role, "value", role),
                "content": fields.get("content"),
                "tool_calls": fields.get("tool_calls"),
            }


def _make_lists(message: MutableMapping[str, object]) -> None:
    """Replace pydantic's iterators, which vLLM can iterate only once after us."""
    for name in ("content", "tool_calls"):
        value = message.get(name)
        if isinstance(value, Iterable) and not isinstance(value, str | list | tuple):
            message[name] = list(value)
