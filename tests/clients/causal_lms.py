"""Small causal LMs with random weights, and log-probs from one forward pass of each."""

from functools import cache
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 40

# Weights large enough for attention to matter. With the usual weights all tokens are about equally likely.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15}
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama, linear rope": (
        "llama",
        SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES | {"head_dim": 16}),
    "qwen3, experts": (
        "qwen3_moe",
        SIZES | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt2": ("gpt2", GPT2),
}


def causal_lm(architecture: str, options: dict[str, Any], **more: Any) -> Any:
    """Return a model with fixed random weights, in eval mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **options)
    model: Any = AutoModelForCausalLM
    return model.from_config(config, **more).eval()


@cache
def small(name: str = "llama", attention: str = "sdpa") -> Any:
    """Return a model of SUPPORTED."""
    return causal_lm(*SUPPORTED[name], attn_implementation=attention)


def scores(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return log-probs [completion, vocabulary] from one forward pass without cache or padding."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    return (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)


def expected_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs [completion] of its tokens."""
    return scores(model, prompt, completion, temperature)[range(len(completion)), completion]


def tokens(seed: int, count: int) -> list[int]:
    """Return random token ids."""
    return Random(seed).choices(range(VOCABULARY), k=count)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a tolerance of 1e-5."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
