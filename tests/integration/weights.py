"""Push weights to a running server and compare its log-probs with those of transformers."""

import time
from typing import Any, Protocol

import httpx
import torch
from safetensors.torch import load_file, save
from transformers import Qwen3ForCausalLM

from darts_server.offline.demo.server import MODEL, Server

PROMPT = "7a-5b*4>"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ORIGINAL: dict[str, torch.Tensor] = load_file(MODEL / "model.safetensors")
Weights = dict[str, torch.Tensor]
Sample = list[tuple[list[int], list[int], list[float]]]
ROUNDING = 5e-5
"""Difference of log-probs in float32: up to 1.4e-5 was measured, by which requests share a step. Other weights differ
by a thousand times as much."""


def perturbed(seed: int) -> Weights:
    """Return the original weights with noise on every tensor."""
    random = torch.Generator().manual_seed(seed)
    return {name: t + 0.005 * torch.randn(t.shape, generator=random) for name, t in ORIGINAL.items()}


def put(server: Server, weights: Weights | bytes, **query: Any) -> httpx.Response:
    body = weights if isinstance(weights, bytes) else save(weights)
    return httpx.put(f"{server.url}/darts/v1/weights", content=body, params=query, timeout=240)


def post(server: Server, path: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/darts/v1/weights", json={"path": path, **more}, timeout=240)


def status(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{server.url}/darts/v1/weights").json()
    return answer


class Running(Protocol):
    """A task or a future."""

    def done(self) -> bool: ...


def wait_announced(server: Server, update: Running) -> None:
    """Wait until an update that has been sent waits for running groups."""
    while status(server)["state"] != "announced":
        assert not update.done(), "the update was to wait for a group"
        time.sleep(0.01)


def sample(server: Server, model: str = "tiny:raw") -> Sample:
    """Return prompt tokens, completion tokens and log-probs of four seeded completions."""
    body = {"model": model, "prompt": [PROMPT, "3b+4a*2>"], "n": 2, "max_tokens": 60, "seed": 1}
    more = {"logprobs": 0, "return_token_ids": True, "temperature": 1.0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=240)
    assert answer.status_code == 200, answer.text
    return [
        (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
        for choice in answer.json()["choices"]
    ]


def is_same(one: Sample, other: Sample) -> bool:
    """Whether two samples are of the same weights: the same tokens, and log-probs but for their rounding."""
    pairs = list(zip(one, other, strict=True))
    if any((mine[0], mine[1]) != (theirs[0], theirs[1]) for mine, theirs in pairs):
        return False
    return all(abs(a - b) < ROUNDING for mine, theirs in pairs for a, b in zip(mine[2], theirs[2], strict=True))


def max_difference(
    server: Server, weights: Weights, model: str = "tiny:raw", dtype: torch.dtype = torch.float32
) -> float:
    """Return the largest difference between the server's log-probs and those of transformers in this precision."""
    reference = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=dtype)
    reference.load_state_dict({HEAD: weights[EMBEDDING], **weights})
    largest = 0.0
    for prompt, completion, logprobs in sample(server, model):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        largest = max(largest, (expected - torch.tensor(logprobs)).abs().max().item())
    return largest


def check_served(server: Server, answer: httpx.Response, weights: Weights) -> dict[str, Any]:
    """Check that an update succeeded and its weights are served; return the update's record."""
    assert answer.status_code == 200, answer.text
    assert max_difference(server, weights) < 1e-5
    last: dict[str, Any] = answer.json()["last"]
    return last
