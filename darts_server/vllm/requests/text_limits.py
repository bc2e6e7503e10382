"""Limit texts before they are tokenized, and token ids before they become text.

Both happen in vLLM at many places: for prompts, chats, tools, truncated prompts, scores and ``/tokenize``. vLLM itself
compares the characters of a prompt with the model's length, but only of a prompt that is neither truncated nor
tokenized by its chat template.
"""

import asyncio
from collections.abc import Callable, Mapping, Sized
from functools import partial, wraps
from typing import Any

from vllm.exceptions import VLLMValidationError

MAX_TOKENIZED = 1024 * 1024
"""Limit where the model's length does not apply (``/tokenize``, ``/detokenize``, truncated prompts): characters of a
text,
or token ids. A text of one token a character takes a second and 200 MB."""

MEDIA = frozenset({"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"})
"""Names of the parts of a chat that are no text."""


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

        # vLLM passes on only template arguments that it finds in the signature.
        @wraps(cls.apply_chat_template)
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            # Mistral's tokenizer tokenizes here without calling the methods above, also for a text.
            if kwargs.get("tokenize", True):
                _check("input_text", _characters([*args, *kwargs.values()]), most_characters)
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
    """Return the number of characters of a text, or of all texts in lists and mappings, except for media."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [each for name, each in value.items() if name not in MEDIA]
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
