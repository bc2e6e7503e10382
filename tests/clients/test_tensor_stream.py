"""A safetensors file that is written while its tensors are gathered."""

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load

from darts_client._io import PIECE_SIZE
from darts_client.integrations._server import TensorStream

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
    "b": torch.tensor(1.5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4, dtype=torch.float16),
    "d": torch.randn(PIECE_SIZE // 4 + 7),  # more than a piece
}
SPECS = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in TENSORS.items()]


def test_the_pieces_are_a_safetensors_file_of_the_announced_size() -> None:
    stream = TensorStream(SPECS, iter(TENSORS.items()))
    pieces = list(stream)
    data = b"".join(pieces)
    assert len(data) == stream.size
    assert all(0 < len(piece) <= PIECE_SIZE for piece in pieces)
    read = load(data)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_tensor_is_fetched_only_when_it_is_sent() -> None:
    fetched = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            fetched.append(name)
            yield name, tensor

    pieces = iter(TensorStream(SPECS, tensors()))
    next(pieces)
    assert fetched == []
    next(pieces)
    assert fetched == ["a"]


def test_a_tensor_that_does_not_match_its_specification_or_has_another_type_is_rejected() -> None:
    for name, dtype, shape in (("x", "float32", [3, 2]), ("a", "float16", [3, 2]), ("a", "float32", [2, 3])):
        with pytest.raises(ValueError, match="expected"):
            list(TensorStream([(name, dtype, shape)], iter([("a", TENSORS["a"])])))
    with pytest.raises(ValueError, match="q is uint8"):
        TensorStream([*SPECS, ("q", "uint8", [2])], iter(()))
    with pytest.raises(ValueError, match="shorter"):
        list(TensorStream(SPECS, iter(())))
