"""Limit texts before they are tokenized, and token ids before they become text.

Both happen in vLLM at many places: for prompts, chats, tools, truncated prompts, scores and ``/tokenize``. vLLM itself
compares the characters of a prompt with the model's length, but only of a prompt that is neither truncated nor
tokenized by its chat template.
"""

import asyncio
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

from vllm.exceptions import VLLMValidationError

MAX_TOKENIZED = 1024 * 1024
"""Limit in characters of a text, and in ids of tokens, that need not fit the model: of ``/tokenize``, ``/detokenize``
and texts that are truncated. A text of one token a character takes a second and 200 MB."""


def limit_texts(renderer: Any) -> None:
    """Let the tokenizer of vLLM's renderer refuse longer texts than fit the model's length, or `MAX_TOKENIZED`.

    A text of more characters than the model's length in tokens times the longest token never fits.
    """
    tokenizer = renderer.tokenizer
    if tokenizer is None:
        return
    length = renderer.model_config.max_model_len
    most_characters = max(MAX_TOKENIZED, length * tokenizer.max_chars_per_token)
    most_tokens = max(MAX_TOKENIZED, length)
    cls: Any = type(tokenizer)

    class LimitedTokenizer(cls):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            _check("input_text", _characters([*args, *kwargs.values()]), most_characters)
            return super().__call__(*args, **kwargs)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            _check("input_text", _characters([*args, *kwargs.values()]), most_characters)
            return super().encode(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            for ids in (*args, *kwargs.values()):
                _check("input_tokens", len(ids) if isinstance(ids, Sized) else 0, most_tokens)
            return super().decode(*args, **kwargs)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("tokenize", True):
                text = super().apply_chat_template(*args, **kwargs | {"tokenize": False})
                _check("input_text", _characters(text), most_characters)
            return super().apply_chat_template(*args, **kwargs)

    # In place, as vLLM makes it a pool of tokenizers: other objects hold it.
    tokenizer.__class__ = LimitedTokenizer


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        unit, remedy = "token ids", "send less"
        if what == "input_text":
            unit, remedy = "characters", "send less, or set truncation_side if the prompt is to be truncated"
        message = f"The input has {size} {unit}, and this server takes at most {most}: {remedy}"
        raise VLLMValidationError(message, parameter=what, value=size)


def _characters(value: object) -> int:
    """Return the characters of a text, or of all texts in lists."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def tokenize_in_threads(state: Any) -> None:
    """Let ``/generative_scoring`` tokenize its texts in a thread: vLLM does it in the event loop.

    ``state``: of vLLM's app.
    """
    scoring = getattr(state, "serving_generative_scoring", None)
    if scoring is not None:
        scoring._build_prompts = partial(_in_thread, scoring._build_prompts)


async def _in_thread(build_prompts: Callable[..., Any], *args: Any) -> Any:
    """Run a coroutine function of vLLM's that never waits in a thread."""
    return await asyncio.to_thread(lambda: asyncio.run(build_prompts(*args)))
