"""Read the chat of vLLM's requests, and the messages of its answers."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from darts_server.rollout.turns.chat_history import ChatHistory


def read_history(request: Any) -> ChatHistory | None:
    """Read the chat of a request in OpenAI's form; ``None`` without one."""
    messages = getattr(request, "messages", None)
    if not isinstance(messages, list) or not all(isinstance(message, MutableMapping) for message in messages):
        return None
    for message in messages:
        _make_lists(message)
    return ChatHistory(messages)


def answered_messages(answer: Any) -> Iterable[Mapping[str, object]]:
    """The messages of a chat's answer that is not streamed."""
    messages = (getattr(choice, "message", None) for choice in getattr(answer, "choices", None) or ())
    return [message.model_dump() for message in messages if message is not None]


def _make_lists(message: MutableMapping[str, object]) -> None:
    """Replace pydantic's iterators, which vLLM can iterate only once after us."""
    for name in ("content", "tool_calls"):
        value = message.get(name)
        if isinstance(value, Iterable) and not isinstance(value, str | list | tuple):
            message[name] = list(value)
