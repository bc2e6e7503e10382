"""A tiny model with random weights that sees images: PaliGemma with the demo's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from darts_server.offline.demo.server import MODEL

CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SIDE, PATCH = 28, 14
"""Pixels of an image's side, and of a patch's."""


def save_vision_model(folder: Path) -> None:
    """Save the model and its processor."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    images: Any = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = (SIDE // PATCH) ** 2
    PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
    of_vision: dict[str, Any] = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "projection_dim": 64,
        "vision_use_head": False,
    }
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, **layers, **of_vision)
    text = GemmaConfig(
        vocab_size=len(tokenizer) + 16,
        hidden_size=64,
        intermediate_size=128,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=320,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **layers,
    )
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    PaliGemmaForConditionalGeneration(config).float().save_pretrained(folder)

    # vLLM knows the vision tower's tensors by the names that they had in earlier versions of transformers.
    saved = folder / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_file(saved).items()
    }
    save_file(tensors, saved, {"format": "pt"})


def _tokenizer() -> Any:
    tokens = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokens.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<image>", special=True)])
    tokens.add_tokens([AddedToken("\n", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=320,
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
