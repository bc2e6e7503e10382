"""The server that a trainer samples from: short calls, and weights that are sent while the trainer gathers them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from .._errors import NotFound
from .._io import PIECE_SIZE
from .._records import WeightsRecord
from .._sync_client import Client
from .._sync_resources import Rule

UPDATE_TIMEOUT = 3600.0
"""Seconds for an update of the weights. The server's own limits are shorter (600 s for running groups, 300 s for each
other phase), and its error says which was exceeded."""
SHORT_TIMEOUT = 10.0
"""Seconds for calls that training can do without."""

TensorSpec = tuple[str, str, Sequence[int]]
"""Name, type (such as `float32`) and shape of a tensor."""

_SAFETENSORS_TYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class Server:
    """A server. Connections are opened for each call: there are few in a step, and none is left open."""

    url: str
    api_key: str | None = None

    def client(self, timeout: float = SHORT_TIMEOUT) -> Client:
        """Return a client that never retries."""
        return Client(self.url, api_key=self.api_key, timeout=timeout, connect_timeout=SHORT_TIMEOUT, retries=0)

    def check_weights(self) -> None:
        """Check that the server accepts weights.

        Raises:
            NotFound: it is not a darts-server.
            DartsError
        """
        try:
            with self.client() as client:
                client.weights.get()
        except NotFound as error:
            raise NotFound(f"{self.url} has no /darts/v1/weights: is it a darts-server?") from error

    def push(self, tensors: "TensorStream", rule: Rule | None = None) -> WeightsRecord:
        """Send new weights. The stream can be read only once, so there is no retry."""
        with self.client(UPDATE_TIMEOUT) as client:
            return client.weights.push_stream(tensors, tensors.size, rule=rule)


class TensorStream:
    """A safetensors file of known size, written while its tensors are gathered: one at a time is in memory.

    Raises:
        ValueError: a tensor has a type that the server does not accept, or does not match its specification.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._specs = specs
        self._tensors = tensors
        header, end = {}, 0
        for name, dtype, shape in specs:
            if dtype not in _SAFETENSORS_TYPES:
                accepted = ", ".join(_SAFETENSORS_TYPES)
                raise ValueError(f"{name} is {dtype}, but weights are sent as {accepted}; use weight_sync='nccl'")
            start, (code, width) = end, _SAFETENSORS_TYPES[dtype]
            end += width * prod(shape)
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # safetensors aligns the tensors to 8 bytes
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + end

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for (name, dtype, shape), (actual_name, tensor) in zip(self._specs, self._tensors, strict=True):
            actual = (actual_name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            if (name, dtype, list(shape)) != actual:
                raise ValueError(f"expected {name}, {dtype} of shape {list(shape)}, got {actual}")
            data = tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy()
            yield from (data[start : start + PIECE_SIZE].tobytes() for start in range(0, len(data), PIECE_SIZE))
