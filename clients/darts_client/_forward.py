"""One forward pass of a causal LM over rows that continue sequences of different lengths.

Keys and values are kept for each sequence on its own, and padded into one cache for the pass.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

# Their frequencies follow the longest sequence of the batch: a prefix is computed otherwise than within the whole.
_SHIFTING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """What attention keeps of consecutive tokens.

    `keys` are [layers, heads, tokens, size of a key], `values` are [layers, heads, tokens, size of a value].
    """

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[2]

    def then(self, later: "KeysValues") -> "KeysValues":
        """These tokens and the later ones, copied."""
        keys = torch.cat([self.keys, later.keys], dim=2)
        return KeysValues(keys, torch.cat([self.values, later.values], dim=2))


@dataclass(frozen=True, slots=True)
class Row:
    """`inputs` continue the tokens of `past`; the log-probs of `targets` are wanted, `targets[i]` after `inputs[i]`.

    Without targets only the keys and values of the inputs are.
    """

    past: Sequence[KeysValues]
    inputs: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Keys and values of a row's inputs; log-probs and entropies [targets], float32, in nats."""

    kept: KeysValues
    logprobs: Tensor
    entropies: Tensor | None


def refuse_unsupported(model: Any) -> None:
    """Raise ValueError, naming what is in the way, if prefixes of this model cannot be computed ahead and kept."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper hides the arguments
    config, arguments = plain.config, inspect.signature(plain.forward).parameters
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    reasons = {
        "is an encoder-decoder": config.is_encoder_decoder,
        "takes no position_ids": "position_ids" not in arguments,
        "reads positions from the attention mask (ALiBi)": getattr(config, "alibi", False),
        f"has layers without full attention ({', '.join(sorted(kind.__name__ for kind in kinds))})": kinds
        != {DynamicLayer},
        f"has rotary embeddings that change with the length ({' or '.join(_SHIFTING_ROPE)})": _rope_shifts(config),
        "lies on several devices": len({parameter.device for parameter in plain.parameters()}) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"model: {type(plain).__name__} {reason}; forward it once over whole trajectories instead")


@torch.no_grad()
def forward(model: Any, rows: Sequence[Row], *, temperature: float, entropy: bool) -> list[Result]:
    """Forward all rows at once. Raises ValueError if the model is in training mode, where dropout would be at work."""
    if model.training:
        raise ValueError("model: is in training mode; call model.eval() first")
    cache, lengths = _padded([row.past for row in rows], model.config)
    counts = [len(row.inputs) for row in rows]
    before, width = max(lengths), max(counts)
    logits = model(
        **_inputs(rows, lengths, model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=width if any(row.targets for row in rows) else 1,
    ).logits
    kept = _appended(cache, before, counts)
    return [
        Result(kept[number], *_scores(logits[number], row.targets, temperature, entropy))
        for number, row in enumerate(rows)
    ]


def _padded(rows: Sequence[Sequence[KeysValues]], config: Any) -> tuple[DynamicCache, list[int]]:
    """A cache with one row for each sequence, made of its parts, and the tokens in each row.

    A row's tokens come first, zeros after; the attention mask has to leave the zeros out.
    """
    cache = DynamicCache(config=config)
    lengths = [sum(map(len, parts)) for parts in rows]
    kept = [part for parts in rows for part in parts]
    if kept:
        keys = _stacked([[part.keys for part in parts] for parts in rows], kept[0].keys, max(lengths))
        values = _stacked([[part.values for part in parts] for parts in rows], kept[0].values, max(lengths))
        for layer in range(len(keys)):
            cache.update(keys[layer], values[layer], layer)
    return cache, lengths


def _appended(cache: Any, before: int, counts: Sequence[int]) -> list[KeysValues]:
    """The first `counts[row]` tokens of each row that a forward pass put behind the `before` that were there.

    They are copies, so that the padded cache can go.
    """
    keys = torch.stack([layer.keys[:, :, before:] for layer in cache.layers])
    values = torch.stack([layer.values[:, :, before:] for layer in cache.layers])
    return [
        KeysValues(keys[:, row, :, :count].clone(), values[:, row, :, :count].clone())
        for row, count in enumerate(counts)
    ]


def _stacked(rows: Sequence[Sequence[Tensor]], like: Tensor, width: int) -> Tensor:
    """[layers, rows, heads, width, size], with each row's parts one after the other and zeros behind them."""
    layers, heads, _, size = like.shape
    result = like.new_zeros(layers, len(rows), heads, width, size)
    for row, parts in enumerate(rows):
        end = 0
        for part in parts:
            start, end = end, end + part.shape[2]
            result[:, row, :, start:end] = part
    return result


def _inputs(rows: Sequence[Row], lengths: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Token ids and positions [rows, most inputs] and the mask [rows, longest past + most inputs], padded at the end.

    The mask leaves out what pads the past, which lies between a row's past and its inputs, and what pads the inputs.
    """
    counts = torch.tensor([len(row.inputs) for row in rows])
    past = torch.tensor(lengths)
    places = torch.arange(int(counts.max())).expand(len(rows), -1)
    ids = torch.zeros(places.shape, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.inputs)] = torch.tensor(row.inputs)
    positions = past[:, None] + places.minimum(counts[:, None] - 1)  # padding repeats the last, which surely exists
    cached = torch.arange(int(past.max())) < past[:, None]
    mask = torch.cat([cached, places < counts[:, None]], dim=1).long()
    return {"input_ids": ids.to(device), "position_ids": positions.to(device), "attention_mask": mask.to(device)}


def _scores(logits: Tensor, targets: Sequence[int], temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Row by row, so that float32 log-probs over the vocabulary exist for one row at a time."""
    scores = (logits[: len(targets)].float() / temperature).log_softmax(dim=-1)
    chosen = torch.tensor(targets, dtype=torch.long, device=logits.device)
    logprobs = scores.gather(-1, chosen[:, None]).squeeze(-1)
    return logprobs, torch.special.entr(scores.exp()).sum(dim=-1) if entropy else None


def _rope_shifts(config: Any) -> bool:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for all layers, or by layer type
    return any(part.get("rope_type") in _SHIFTING_ROPE for part in kinds)
