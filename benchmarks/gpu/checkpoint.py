"""Write a checkpoint with Qwen3's tensor names and shapes, and random values."""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

from benchmarks.gpu.models import Shape

FILE = "model.safetensors"
DTYPES = {2: "BF16", 4: "F32"}
BLOCK = 1 << 22
"""Number of random values, repeated through the whole file: generating all of them would take longer than writing."""
STD = 0.02


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor, as in the files that Qwen published."""
    hidden, head = shape.hidden, shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (shape.heads * head, hidden),
        "self_attn.k_proj": (shape.kv_heads * head, hidden),
        "self_attn.v_proj": (shape.kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, shape.heads * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden)
    for number in range(shape.layers):
        for name, size in layer.items():
            yield f"model.layers.{number}.{name}.weight", size
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocabulary, hidden)


def write(shape: Shape, path: Path) -> None:
    """Write a safetensors file piece by piece: the library's own writer needs all tensors in memory first."""
    header, end = dict[str, object](), 0
    for name, size in tensors(shape):
        start, end = end, end + prod(size) * shape.value_bytes
        header[name] = {"dtype": DTYPES[shape.value_bytes], "shape": size, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = memoryview(_values(shape.value_bytes))
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])


def _values(value_bytes: int) -> bytes:
    import torch

    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * STD
    if value_bytes == 2:
        values = values.bfloat16()
    return values.view(torch.uint8).numpy().tobytes()
