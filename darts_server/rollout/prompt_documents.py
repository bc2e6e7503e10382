"""Prompts as bytes, for the disk."""

from pydantic import TypeAdapter

from darts_server.types import PromptSpec

_PROMPT = TypeAdapter(PromptSpec)


def encode_prompt(prompt: PromptSpec) -> bytes:
    return _PROMPT.dump_json(prompt, exclude_none=True)


def decode_prompt(document: bytes) -> PromptSpec:
    """
    Raises:
        ValueError: its fields have other types than ours.
    """
    return _PROMPT.validate_json(document, strict=True)
