"""Token sequences with separate caches of keys and values, and one forward pass that continues several of them."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

# The frequencies depend on the longest sequence of the batch, so the same prefix gets other keys in another batch.
_CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """The cached keys and values of consecutive tokens."""

    keys: Tensor
    """[layers, heads, tokens, size of a key]"""
    values: Tensor
    """[layers, heads, tokens, size of a value]"""

    def __len__(self) -> int:
        return self.keys.shape[2]

    def concat(self, later: "KeysValues") -> "KeysValues":
        keys = torch.cat([self.keys, later.keys], dim=2)
        values = torch.cat([self.values, later.values], dim=2)
        return KeysValues(keys, values)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a forward pass. `inputs` continue `past`; `targets[i]`, which is scored, follows `inputs[i]`."""

    past: Sequence[KeysValues]
    inputs: Sequence[int]
    targets: Sequence[int]

    @property
    def past_length(self) -> int:
        return sum(len(part) for part in self.past)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Keys and values of a row's inputs; log-probs and entropies [targets] in nats, float32."""

    cache: KeysValues
    logprobs: Tensor
    entropies: Tensor | None


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens that are forwarded in order. The last token waits until the next token is known."""

    tokens: list[int]
    num_forwarded: int = 0
    cache: KeysValues | None = None

    @property
    def num_pending(self) -> int:
        """Number of tokens that can be forwarded now."""
        # Logits of the last token would score a token that is not known yet.
        return len(self.tokens) - 1 - self.num_forwarded

    def past_caches(self) -> list[KeysValues]:
        return [] if self.cache is None else [self.cache]

    def next_row(self, count: int) -> Row:
        end = self.num_forwarded + count
        # A prompt's tokens are not scored.
        return Row(self.past_caches(), self.tokens[self.num_forwarded : end], targets=[])

    def add_result(self, result: Result) -> None:
        if self.cache is None:
            self.cache = result.cache
        else:
            self.cache = self.cache.concat(result.cache)
        self.num_forwarded += len(result.cache)


@dataclass(slots=True, eq=False)
class PromptSequence(TokenSequence):
    """A prompt. Its last token is the first token of each candidate, so that the first completion token is scored."""

    is_closed: bool = False
    candidates: "list[CandidateSequence]" = field(default_factory=list)

    def drop_cache_if_unused(self) -> None:
        if self.is_closed and not any(candidate.may_continue for candidate in self.candidates):
            self.cache = None
            # No token is pending any more.
            self.num_forwarded = len(self.tokens) - 1


@dataclass(slots=True, eq=False, kw_only=True)
class CandidateSequence(TokenSequence):
    """The last token of a prompt, then the tokens of a completion. It attends to the prompt's cache without a copy."""

    trajectory_id: str
    number: int
    prompt: PromptSequence
    is_finished: bool = False
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    @property
    def may_continue(self) -> bool:
        """Whether it has, or may get, tokens to forward."""
        return not self.is_finished or self.num_pending > 0

    def past_caches(self) -> list[KeysValues]:
        # `super()` fails in a dataclass with slots.
        return [*self.prompt.past_caches(), *TokenSequence.past_caches(self)]

    def next_row(self, count: int) -> Row:
        start = self.num_forwarded
        end = start + count
        # The logits of each token score the token after it.
        return Row(self.past_caches(), self.tokens[start:end], targets=self.tokens[start + 1 : end + 1])

    def add_result(self, result: Result) -> None:
        TokenSequence.add_result(self, result)
        self.logprobs.append(result.logprobs)
        if result.entropies is not None:
            self.entropies.append(result.entropies)
        self._drop_cache_if_done()

    def finish(self, length: int) -> None:
        # The first token is the prompt's last.
        del self.tokens[length + 1 :]
        self.num_forwarded = min(self.num_forwarded, length)
        self.is_finished = True
        self._drop_cache_if_done()

    def _drop_cache_if_done(self) -> None:
        if not self.may_continue:
            self.cache = None
            self.prompt.drop_cache_if_unused()

    def concat_values(self, chunks: list[Tensor]) -> Tensor:
        """Concatenate log-probs or entropies to [length]."""
        if not chunks:
            return torch.empty(0)
        # Tokens may have been forwarded before the server cut the candidate.
        return torch.cat(chunks)[: self.length]


def next_batch(sequences: Iterable[TokenSequence], batch_tokens: int) -> list[tuple[TokenSequence, Row]]:
    """Choose sequences to forward together. rows * (longest past + most inputs) is at most `batch_tokens`.

    A single row may have so many inputs beside its past.
    """
    batch: list[tuple[TokenSequence, Row]] = []
    longest_past = 0
    most_inputs = 0
    # Most pending tokens first: rows of similar length need little padding, and no sequence falls behind.
    for sequence in sorted(sequences, key=lambda sequence: sequence.num_pending, reverse=True):
        row = sequence.next_row(min(sequence.num_pending, batch_tokens))
        longest_past = max(longest_past, row.past_length)
        most_inputs = max(most_inputs, len(row.inputs))
        padded_tokens = (len(batch) + 1) * (longest_past + most_inputs)
        if batch and padded_tokens > batch_tokens:
            break
        batch.append((sequence, row))
    return batch


def check_supported(model: Any) -> None:
    """Raise ValueError if the keys and values of a prefix of this model cannot be cached."""
    # PEFT's wrapper hides the arguments of `forward`.
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = plain.config
    layer_types = {type(layer) for layer in DynamicCache(config=config).layers}
    names = ", ".join(sorted(layer_type.__name__ for layer_type in layer_types))
    devices = {parameter.device for parameter in plain.parameters()}
    reasons = {
        "is an encoder-decoder": config.is_encoder_decoder,
        "takes no position_ids": "position_ids" not in inspect.signature(plain.forward).parameters,
        "reads positions from the attention mask (ALiBi)": getattr(config, "alibi", False),
        f"has layers without full attention ({names})": layer_types != {DynamicLayer},
        f"has rotary embeddings that change with the length ({' or '.join(_CHANGING_ROPE)})": _rope_changes(config),
        "is on several devices": len(devices) > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"model: {type(plain).__name__} {reason}; forward it once over whole trajectories instead")


@torch.no_grad()
def forward(
    model: Any,
    rows: Sequence[Row],
    *,
    temperature: float,
    entropy: bool,
) -> list[Result]:
    # Dropout would be active in training mode.
    if model.training:
        raise ValueError("model: is in training mode; call model.eval() first")
    past_width = max(row.past_length for row in rows)
    most_inputs = max(len(row.inputs) for row in rows)
    cache = _pad_caches(rows, past_width, model.config)
    # Logits take the most memory, and rows without targets do not use them.
    needs_logits = any(row.targets for row in rows)
    logits = model(
        **_model_inputs(rows, model.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=most_inputs if needs_logits else 1,
    ).logits
    # The model has appended the inputs to the cache, behind the padding.
    keys = torch.stack([layer.keys[:, :, past_width:] for layer in cache.layers])
    values = torch.stack([layer.values[:, :, past_width:] for layer in cache.layers])
    results = []
    for index, row in enumerate(rows):
        # Copies let the padded cache be freed.
        row_keys = keys[:, index, :, : len(row.inputs)].clone()
        row_values = values[:, index, :, : len(row.inputs)].clone()
        logprobs, entropies = _score(logits[index], row.targets, temperature, entropy)
        results.append(Result(KeysValues(row_keys, row_values), logprobs, entropies))
    return results


def _pad_caches(rows: Sequence[Row], width: int, config: Any) -> Any:
    """Return a cache with the past of each row, padded with zeros at the end to `width` tokens."""
    cache: Any = DynamicCache(config=config)
    if width:
        keys = _stack_padded([[part.keys for part in row.past] for row in rows], width)
        values = _stack_padded([[part.values for part in row.past] for row in rows], width)
        for layer in range(len(keys)):
            cache.update(keys[layer], values[layer], layer)
    return cache


def _stack_padded(rows: Sequence[Sequence[Tensor]], width: int) -> Tensor:
    """Return [layers, rows, heads, width, size]: the parts of each row, then zeros."""
    any_part = next(part for parts in rows for part in parts)
    layers, heads, _, size = any_part.shape
    stacked = any_part.new_zeros(layers, len(rows), heads, width, size)
    for row, parts in enumerate(rows):
        start = 0
        for part in parts:
            end = start + part.shape[2]
            stacked[:, row, :, start:end] = part
            start = end
    return stacked


def _model_inputs(rows: Sequence[Row], device: torch.device) -> dict[str, Tensor]:
    """Return ids and positions [rows, most inputs], and the mask [rows, longest past + most inputs]."""
    num_inputs = torch.tensor([len(row.inputs) for row in rows])[:, None]
    past_lengths = torch.tensor([row.past_length for row in rows])[:, None]
    offsets = torch.arange(int(num_inputs.max())).expand(len(rows), -1)
    ids = torch.zeros(offsets.shape, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.inputs)] = torch.tensor(row.inputs)
    # Padding repeats the last position, because a higher position may be beyond the model's limit.
    positions = past_lengths + offsets.minimum(num_inputs - 1)
    # The padding of a row's past lies before its inputs.
    is_cached = torch.arange(int(past_lengths.max())) < past_lengths
    is_input = offsets < num_inputs
    mask = torch.cat([is_cached, is_input], dim=1).long()
    return {"input_ids": ids.to(device), "position_ids": positions.to(device), "attention_mask": mask.to(device)}


def _score(
    logits: Tensor,
    targets: Sequence[int],
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    # Float32 scores over the vocabulary exist for one row at a time.
    scores = (logits[: len(targets)].float() / temperature).log_softmax(dim=-1)
    target_ids = torch.tensor(targets, dtype=torch.long, device=logits.device)
    logprobs = scores.gather(-1, target_ids[:, None]).squeeze(-1)
    entropies = None
    if entropy:
        entropies = torch.special.entr(scores.exp()).sum(dim=-1)
    return logprobs, entropies


def _rope_changes(config: Any) -> bool:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # Some models have parameters for each type of layer.
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    return any(part.get("rope_type") in _CHANGING_ROPE for part in [rope, *by_layer_type])
