"""Tensors sent as a safetensors file while they come, one after the other."""

import json
from collections.abc import Iterator, Sequence
from math import prod

import torch

from .._weights import PIECE

Announced = tuple[str, str, Sequence[int]]
"""A tensor to come: its name, its type as in `float32`, its shape."""

_TYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


class TensorStream:
    """A safetensors file of known size, made of tensors that come later: of these, one at a time is in memory.

    Raises:
        ValueError: a tensor is of a type that the server does not take, or comes otherwise than announced.
    """

    def __init__(self, announced: Sequence[Announced], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._announced = announced
        self._tensors = tensors
        header, end = {}, 0
        for name, kind, shape in announced:
            if kind not in _TYPES:
                raise ValueError(
                    f"{name} is {kind}, but weights are sent as {', '.join(_TYPES)}; use weight_sync='nccl'"
                )
            start, (told, width) = end, _TYPES[kind]
            end += width * prod(shape)
            header[name] = {"dtype": told, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # as safetensors aligns it
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + end

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for (name, kind, shape), (came, tensor) in zip(self._announced, self._tensors, strict=True):
            if (name, kind, list(shape)) != (came, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)):
                raise ValueError(f"{name}, {kind} of shape {list(shape)}, was announced, but {came} came otherwise")
            data = tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy()
            yield from (data[start : start + PIECE].tobytes() for start in range(0, len(data), PIECE))
