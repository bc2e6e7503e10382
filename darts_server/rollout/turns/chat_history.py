"""Recognise answers of ours in the history of a chat.

Callers return an answer as they got it, but for white space and the form of a tool call's arguments. Many drop the
reasoning, so an answer is known with and without it.

Keys are Python's hashes of strings: 64 bits with a secret of this process, and several times as fast as a digest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

ASSISTANT = "assistant"
END_OF_REASONING = "</think>"

Message = Mapping[str, object]
"""A message in OpenAI's form."""


class ChatHistory:
    """The messages of one request.

    ``answers``: keys of the assistant's messages. A key stands for a message and all those before it, so that a short
    answer such as "4" in the examples of a prompt is not mistaken for one of ours. Keys of different callers differ.
    ``rank``: of the engine that answers it, once that is known. ``follows``: whether it goes on from an answer that the
    server has kept, whose messages are not among these.
    """

    def __init__(self, messages: Iterable[Message], caller: str = "", *, follows: bool = False) -> None:
        self.answers: list[int] = []
        self.rank: int | None = None
        self.follows = follows
        self._earlier = hash(caller)
        for message in messages:
            role, text = str(message.get("role")), _text(message)
            key = self._key(text)
            if role == ASSISTANT:
                self.answers.append(key)
            self._earlier = hash((key, role))

    def keys_of(self, text: str) -> Iterator[int]:
        """Keys of an answer with this text, as generated."""
        yield self._key(text)
        reasoning, _, answer = text.rpartition(END_OF_REASONING)
        if reasoning:
            yield self._key(answer)

    def key_of(self, message: Message) -> int:
        """Key of an answer with this message, whose reasoning and tool calls were parsed."""
        return self._key(_text(message))

    def _key(self, text: str) -> int:
        return hash((self._earlier, text.strip()))


def _text(message: Message) -> str:
    """Everything of a message that its sender keeps when it is sent again; media by their type alone."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [_part(part) for part in content] if isinstance(content, list | tuple) else [_part(content)]
    text = "".join(parts).strip()
    return text if not isinstance(calls, list | tuple) else "\0".join([text, *map(_call, calls)])


def _part(part: object) -> str:
    if isinstance(part, Mapping):
        text = part.get("text")
        return text if isinstance(text, str) else str(part.get("type"))
    return part if isinstance(part, str) else ""


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):  # the model wrote no JSON, or nested it thousands of times
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = json.dumps(parsed, sort_keys=True, default=str)
    return f"{function.get('name')}{arguments}"
