import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import resolve_chat_template_kwargs
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.hf import maybe_make_thread_pool

from darts_server.offline.demo.server import MODEL
from darts_server.vllm.requests import text_limits
from darts_server.vllm.requests.text_limits import limit_texts, tokenize_in_threads

MOST = 10_000
LONG = "7" * (MOST + 1)
CHAT = [{"role": "user", "content": "7a>"}]


@pytest.fixture(autouse=True)
def lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing a million characters takes seconds."""
    monkeypatch.setattr(text_limits, "MAX_TOKENIZED", MOST)


@pytest.fixture(params=[False, True], ids=["single", "pool"])
def tokenizer(lower_limit: None, request: pytest.FixtureRequest) -> Any:
    tokenizer = get_tokenizer(MODEL)
    if request.param:
        tokenizer = maybe_make_thread_pool(tokenizer, 2)
    limit_texts(SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(max_model_len=320)))
    return tokenizer


def test_texts_within_the_limit_are_tokenized_as_before(tokenizer: Any) -> None:
    plain: Any = get_tokenizer(MODEL)
    assert tokenizer("7a>")["input_ids"] == plain("7a>")["input_ids"] == tokenizer.encode("7a>")
    assert tokenizer(["7a>", "5"])["input_ids"] == plain(["7a>", "5"])["input_ids"]
    assert tokenizer.decode([5, 6, 7]) == plain.decode([5, 6, 7])
    assert tokenizer.decode(5) == plain.decode(5)
    for tokenize in (True, False):
        chat = tokenizer.apply_chat_template(CHAT, tokenize=tokenize, return_dict=False)
        assert chat == plain.apply_chat_template(CHAT, tokenize=tokenize, return_dict=False)
    assert len(tokenizer.encode(LONG[1:])) == MOST


def test_longer_texts_are_refused_wherever_they_are(tokenizer: Any) -> None:
    long_chat = [{"role": "user", "content": LONG}]
    calls: list[Callable[[], object]] = [
        lambda: tokenizer(LONG, truncation=True, max_length=5),
        lambda: tokenizer([LONG[:-1], "7"]),
        lambda: tokenizer(text="7", text_pair=LONG),
        lambda: tokenizer.encode(text=LONG),
        lambda: tokenizer.apply_chat_template(long_chat),
        lambda: tokenizer.decode([5] * (MOST + 1)),
    ]
    for tokenize in calls:
        with pytest.raises(VLLMValidationError, match=f"at most {MOST}") as caught:
            tokenize()
        assert caught.value.parameter in ("input_text", "input_tokens")
    # The text is checked when it is tokenized.
    assert len(tokenizer.apply_chat_template(long_chat, tokenize=False)) >= len(LONG)


class OwnTemplate:
    """A tokenizer that tokenizes in its template, with an additional argument."""

    max_chars_per_token = 1

    def __init__(self) -> None:
        self.calls = 0

    def apply_chat_template(
        self, conversation: object, tools: object = None, tokenize: bool = True, style: str = "", **_: object
    ) -> list[int]:
        self.calls += 1
        return [1]

    def __call__(self, *_: object) -> None: ...
    def encode(self, *_: object) -> None: ...
    def decode(self, *_: object) -> None: ...


def test_arguments_of_a_tokenizers_own_template_are_still_found() -> None:
    tokenizer: Any = OwnTemplate()
    limit_texts(SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(max_model_len=320)))
    assert resolve_chat_template_kwargs(tokenizer, "{{ messages }}", {"style": "short"}) == {"style": "short"}


def test_a_template_that_tokenizes_is_called_once_and_not_for_a_longer_chat() -> None:
    tokenizer: Any = OwnTemplate()
    limit_texts(SimpleNamespace(tokenizer=tokenizer, model_config=SimpleNamespace(max_model_len=320)))
    image = {"type": "image_url", "image_url": {"url": LONG}}
    tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "7"}, image]}])
    assert tokenizer.calls == 1
    with pytest.raises(VLLMValidationError, match=f"at most {MOST}"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": LONG}]}])
    assert tokenizer.calls == 1


def test_a_model_with_a_greater_length_gets_longer_texts() -> None:
    tokenizer: Any = get_tokenizer(MODEL)
    model = SimpleNamespace(max_model_len=MOST + 1)
    limit_texts(SimpleNamespace(tokenizer=tokenizer, model_config=model))
    assert len(tokenizer.encode(LONG)) == len(tokenizer.decode([5] * len(LONG)))
    limit_texts(SimpleNamespace(tokenizer=None, model_config=model))


def test_scores_tokenize_their_texts_outside_of_the_event_loop() -> None:
    async def build(*args: Any) -> tuple[int, tuple[Any, ...]]:
        return threading.get_ident(), args

    async def run() -> None:
        scoring = SimpleNamespace(_build_prompts=build)
        tokenize_in_threads(SimpleNamespace(serving_generative_scoring=scoring))
        thread, args = await scoring._build_prompts(1, 2)
        assert thread != threading.get_ident()
        assert args == (1, 2)

    asyncio.run(run())
    tokenize_in_threads(SimpleNamespace())
