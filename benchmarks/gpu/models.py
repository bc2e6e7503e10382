"""Model architectures without weights, a tokenizer of made-up words, and the bytes that a decode step reads.

The numbers are those of the ``config.json`` that Qwen published with each model (huggingface.co/Qwen/Qwen3-0.6B,
Qwen3-1.7B, Qwen3-8B).
"""

import json
from dataclasses import dataclass
from pathlib import Path

EOS, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Shape:
    """A Qwen3 architecture. ``value_bytes``: size of a weight, and of a value in the KV cache."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    vocabulary: int = 151_936
    context: int = 40_960
    value_bytes: int = 2

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.value_bytes

    @property
    def kv_bytes(self) -> int:
        """Size of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    def step_bytes(self, batch: int, tokens: float) -> float:
        """Return the bytes that a decode step must read for ``batch`` sequences of ``tokens`` tokens each.

        These are all weights, except for an untied input embedding, of which a step reads a row for each sequence.
        """
        unread = 0 if self.tied else self.embedding * self.value_bytes
        return self.weight_bytes - unread + batch * tokens * self.kv_bytes

    def write(self, folder: Path) -> Path:
        """Write ``config.json`` and a tokenizer: all that an engine with dummy weights needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._config(), indent=2))
        write_tokenizer(folder, self.vocabulary)
        return folder

    def _config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": EOS,
            "eos_token_id": EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "max_window_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16" if self.value_bytes == 2 else "float32",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with a word for each token id, so that every sampled id has a text."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f" w{number}": number for number in range(vocabulary)}
    backend = Tokenizer(WordLevel(words, unk_token=f" w{UNKNOWN}"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=f" w{EOS}", unk_token=f" w{UNKNOWN}", clean_up_tokenization_spaces=False
    )
    tokenizer.save_pretrained(folder)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6B", layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, tied=True),
        Shape("1.7B", layers=28, hidden=2048, intermediate=6144, heads=16, kv_heads=8, head_dim=128, tied=True),
        Shape("8B", layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, tied=False),
    )
}
# The size of the model in examples/tiny_rl, for machines without a GPU.
TINY = Shape(
    "tiny", 3, 128, 256, heads=4, kv_heads=2, head_dim=32, tied=True, vocabulary=64, context=2048, value_bytes=4
)
