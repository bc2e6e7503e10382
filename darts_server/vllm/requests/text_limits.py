"""Limit texts before they are tokenized, and token ids before they become text.

vLLM does both in many places. It limits the characters of a prompt only if the prompt is neither truncated nor
tokenized by a chat template.
"""

import asyncio
from collections.abc import Callable, Mapping, Sized
from functools import partial, wraps
from typing import Any

from vllm.exceptions import VLLMValidationError

# Limit of characters, or of token ids, where the model's length does not apply: ``/tokenize``, ``/detokenize`` and
# truncated prompts. A text with one token per character then takes a second and 200 MB.
MAX_TOKENIZED = 1024 * 1024

MEDIA = frozenset({"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"})


def limit_texts(renderer: Any) -> None:
    tokenizer = renderer.tokenizer
    if tokenizer is None:
        return
    model_length = renderer.model_config.max_model_len
    # A text with more characters never fits the model's length.
    max_characters = max(MAX_TOKENIZED, model_length * tokenizer.max_chars_per_token)
    max_tokens = max(MAX_TOKENIZED, model_length)
    cls: Any = type(tokenizer)

    def check_texts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        size = count_characters([*args, *kwargs.values()])
        if size > max_characters:
            raise VLLMValidationError(
                f"The input has {size} characters, and this server takes at most {max_characters}: send less, or set "
                "truncation_side if the prompt is to be truncated",
                parameter="input_text",
                value=size,
            )

    class LimitedTokenizer(cls):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            check_texts(args, kwargs)
            return super().__call__(*args, **kwargs)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            check_texts(args, kwargs)
            return super().encode(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            for ids in (*args, *kwargs.values()):
                if isinstance(ids, Sized) and len(ids) > max_tokens:
                    raise VLLMValidationError(
                        f"The input has {len(ids)} token ids, and this server takes at most {max_tokens}: send less",
                        parameter="input_tokens",
                        value=len(ids),
                    )
            return super().decode(*args, **kwargs)

        # `wraps` keeps the signature: vLLM passes on only template arguments that are in it.
        @wraps(cls.apply_chat_template)
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            # Mistral's tokenizer tokenizes here without calling the methods above, even for a text.
            if kwargs.get("tokenize", True):
                check_texts(args, kwargs)
            return super().apply_chat_template(*args, **kwargs)

    # Change the object in place, as vLLM does when it makes a pool of tokenizers: other objects refer to it.
    tokenizer.__class__ = LimitedTokenizer


def count_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    # A part of a chat. Media are long texts that are not tokenized.
    if isinstance(value, Mapping):
        value = [part for name, part in value.items() if name not in MEDIA]
    if isinstance(value, list | tuple):
        return sum(map(count_characters, value))
    return 0


def tokenize_in_threads(state: Any) -> None:
    """Let ``/generative_scoring`` not tokenize in the event loop. ``state``: of vLLM's app."""
    scoring = getattr(state, "serving_generative_scoring", None)
    if scoring is not None:
        scoring._build_prompts = partial(_build_prompts_in_thread, scoring._build_prompts)


async def _build_prompts_in_thread(build_prompts: Callable[..., Any], *args: Any) -> Any:
    # vLLM's coroutine blocks and never awaits, so it can run in an event loop of its own.
    return await asyncio.to_thread(lambda: asyncio.run(build_prompts(*args)))
