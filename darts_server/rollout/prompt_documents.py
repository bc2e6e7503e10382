"""Prompts as bytes, for the disk."""

import json

from darts_server.types import PromptSpec


def encode_prompt(prompt: PromptSpec) -> bytes:
    metadata = None if prompt.metadata is None else prompt.metadata.decode()
    values = {
        "token_ids": prompt.token_ids,
        "messages": prompt.messages,
        "text": prompt.text,
        "key": prompt.key,
        "metadata": metadata,
    }
    return json.dumps({name: value for name, value in values.items() if value is not None}).encode()


def decode_prompt(document: bytes) -> PromptSpec:
    values = json.loads(document)
    metadata = values.pop("metadata", None)
    return PromptSpec(**values, metadata=None if metadata is None else metadata.encode())
