"""Model architectures, made-up weights and tokenizers for them, and the bytes that a decode step reads.

The numbers are those of the ``config.json`` that Qwen published with each model (huggingface.co/Qwen/Qwen3-0.6B,
Qwen3-1.7B, Qwen3-8B).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

EOS, UNKNOWN = 0, 1
CHECKPOINT = "model.safetensors"
BLOCK = 1 << 22
"""Number of random values, repeated through the whole file: generating all of them would take longer than writing."""
STD = 0.02


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
        from tokenizers import Tokenizer
        from tokenizers.decoders import Fuse
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "bos_token_id": EOS,
            "eos_token_id": EOS,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16" if self.value_bytes == 2 else "float32",
            "vocab_size": self.vocabulary,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        # A word for each token id, so that every sampled id has a text.
        words = {f" w{number}": number for number in range(self.vocabulary)}
        backend = Tokenizer(WordLevel(words, unk_token=f" w{UNKNOWN}"))
        backend.pre_tokenizer = WhitespaceSplit()
        backend.decoder = Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=f" w{EOS}", unk_token=f" w{UNKNOWN}", clean_up_tokenization_spaces=False
        )
        tokenizer.save_pretrained(folder)
        return folder

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each tensor, as in the files that Qwen published."""
        hidden, head = self.hidden, self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (self.heads * head, hidden),
            "self_attn.k_proj": (self.kv_heads * head, hidden),
            "self_attn.v_proj": (self.kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, self.heads * head),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
        }
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for number in range(self.layers):
            for name, size in layer.items():
                yield f"model.layers.{number}.{name}.weight", size
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, hidden)

    def write_checkpoint(self, folder: Path) -> None:
        """Write a safetensors file piece by piece: the library's own writer needs all tensors in memory first."""
        import torch

        header, end = dict[str, object](), 0
        for name, size in self.tensors():
            start, end = end, end + prod(size) * self.value_bytes
            dtype = "BF16" if self.value_bytes == 2 else "F32"
            header[name] = {"dtype": dtype, "shape": size, "data_offsets": (start, end)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * STD
        if self.value_bytes == 2:
            values = values.bfloat16()
        block = memoryview(values.view(torch.uint8).numpy().tobytes())
        with (folder / CHECKPOINT).open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, len(block)):
                file.write(block[: end - start])


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
