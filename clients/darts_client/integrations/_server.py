"""The server of a trainer: short calls, and weights that are sent while the trainer gathers them."""

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
other phase), and its error names the limit that was exceeded."""
RECONNECTS = 5
"""Tries to continue a batch whose connection was lost. The server goes on with the batch meanwhile."""
SHORT_TIMEOUT = 10.0
"""Seconds for calls that training can do without."""

TensorSpec = tuple[str, str, Sequence[int]]
"""Name, type (such as `float32`) and shape of a tensor."""

_SAFETENSORS_TYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server. Each call opens its own connection, because a training step makes only a few calls."""

    url: str
    api_key: str | None = None

    def client(self, timeout: float = SHORT_TIMEOUT, retries: int = 0) -> Client:
        """Return a client that by default never retries."""
        return Client(
            self.url,
            api_key=self.api_key,
            timeout=timeout,
            connect_timeout=SHORT_TIMEOUT,
            retries=retries,
        )

    def check_weights(self) -> None:
        """Check that the server accepts weights.

        Raises:
            NotFound: the server is not a darts-server.
            DartsError: the request failed.
        """
        try:
            with self.client() as client:
                client.weights.get()
        except NotFound as error:
            raise NotFound(f"{self.url} has no /darts/v1/weights: is it a darts-server?") from error

    def push(self, tensors: "TensorStream", rule: Rule | None = None) -> WeightsRecord:
        """Send new weights. There is no retry, because the stream can be read only once."""
        with self.client(UPDATE_TIMEOUT) as client:
            return client.weights.push_stream(tensors, tensors.size, rule=rule)


class TensorStream:
    """A safetensors file of known size, written while its tensors are gathered. One tensor at a time is in memory.

    Raises:
        ValueError: the server does not accept the type of a tensor, or a tensor does not match its specification.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._specs = specs
        self._tensors = tensors
        header_entries = {}
        data_size = 0
        for name, dtype, shape in specs:
            if dtype not in _SAFETENSORS_TYPES:
                accepted = ", ".join(_SAFETENSORS_TYPES)
                raise ValueError(f"{name} is {dtype}, but weights are sent as {accepted}; use weight_sync='nccl'")
            code, bytes_per_value = _SAFETENSORS_TYPES[dtype]
            start = data_size
            data_size += bytes_per_value * prod(shape)
            header_entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, data_size]}
        header = json.dumps(header_entries).encode()
        # safetensors aligns the tensors to 8 bytes.
        header += b" " * (-len(header) % 8)
        self._head = len(header).to_bytes(8, "little") + header
        self.size = len(self._head) + data_size

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for (name, dtype, shape), (actual_name, tensor) in zip(self._specs, self._tensors, strict=True):
            actual = specify_tensor(actual_name, tensor)
            if actual != (name, dtype, list(shape)):
                raise ValueError(f"expected {name}, {dtype} of shape {list(shape)}, got {actual}")
            # Viewed as bytes, because numpy has no bfloat16.
            data = tensor.detach().reshape(-1).cpu().view(torch.uint8).numpy()
            for start in range(0, len(data), PIECE_SIZE):
                yield data[start : start + PIECE_SIZE].tobytes()


def specify_tensor(name: str, tensor: torch.Tensor) -> TensorSpec:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
