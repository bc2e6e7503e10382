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


def completion(*choices: dict[str, Any], id: str = "cmpl-1") -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "choices": list(choices), "usage": {"prompt_tokens": 1}}


def answer(body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(200, json=body, headers=headers, request=httpx.Request("POST", f"{URL}/v1/completions"))


def full_completion(body: dict[str, Any]) -> dict[str, Any]:
    """Return a valid answer to the body of a request; trajectory k of a group has k + 1 tokens."""
    n = body["n"]
    return completion(
        *(
            choice(position * n + k, token_ids=tuple(range(k + 1)), prompt=prompt if isinstance(prompt, list) else [0])
            for position, prompt in enumerate(body["prompt"])
            for k in range(n)
        )
    )
