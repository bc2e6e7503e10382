"""vLLM's answers, as plain dictionaries."""

from typing import Any

import httpx

URL = "http://server"
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}, {"id": "tiny:raw", "object": "model"}]}


def choice(
    index: int, token_ids: tuple[int, ...] = (7, 8), prompt: list[int] | None = None, **changes: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "text": f"answer {index}",
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(token_ids),
        "prompt_token_ids": prompt,
        "logprobs": {"token_logprobs": [-0.5 for _ in token_ids], "tokens": ["t" for _ in token_ids]},
        **changes,
    }


def completion(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "choices": list(choices), "usage": {"prompt_tokens": 1}}


def answer(body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(200, json=body, headers=headers, request=httpx.Request("POST", f"{URL}/v1/completions"))
