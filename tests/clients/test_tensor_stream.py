"""Tensors that come one after the other, as a safetensors file."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load

from darts_client._weights import PIECE
from darts_client.integrations._tensors import TensorStream

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
    "b": torch.tensor(1.5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4, dtype=torch.float16),
    "d": torch.randn(PIECE // 4 + 7),  # more than a piece
}
ANNOUNCED = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in TENSORS.items()]


def test_the_pieces_are_a_safetensors_file_of_the_size_that_was_told() -> None:
    stream = TensorStream(ANNOUNCED, iter(TENSORS.items()))
    pieces = list(stream)
    data = b"".join(pieces)
    assert len(data) == stream.size
    assert all(0 < len(piece) <= PIECE for piece in pieces)
    read = load(data)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_tensor_is_fetched_only_when_its_turn_has_come() -> None:
    fetched = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            fetched.append(name)
            yield name, tensor

    pieces = iter(TensorStream(ANNOUNCED, tensors()))
    next(pieces)
    assert fetched == []
    next(pieces)
    assert fetched == ["a"]


def test_types_that_the_server_does_not_take_are_refused_with_the_name() -> None:
    with pytest.raises(ValueError, match="q is uint8"):
        TensorStream([*ANNOUNCED, ("q", "uint8", [2])], iter(()))


def test_what_comes_otherwise_than_announced_is_refused() -> None:
    for name, kind, shape in (("x", "float32", [3, 2]), ("a", "float16", [3, 2]), ("a", "float32", [2, 3])):
        with pytest.raises(ValueError, match="came otherwise"):
            list(TensorStream([(name, kind, shape)], iter([("a", TENSORS["a"])])))
    with pytest.raises(ValueError, match="shorter"):
        list(TensorStream(ANNOUNCED, iter(())))
