"""Weights of TRL's asynchronous trainer, over HTTP."""

from collections.abc import Iterator
from typing import Any

import torch

from ._server import Server, TensorSpec, TensorStream

READY_TIMEOUT = 240.0
"""TRL's own default."""


class WeightTransfer:
    """The `weight_transfer` of TRL's `AsyncGRPOTrainer`: sends weights in the body of `PUT /darts/v1/weights`.

    Groups that run while weights arrive continue with them, as TRL intends; they are marked as mixed. There is no NCCL,
    and the server needs no development routes. With a `peft_config` TRL merges the adapter for it.

    All weights are in memory once, in the main process, at the first update: their number and shapes are not known
    before. Later ones are sent while they are gathered.

    Args:
        url: of the server, the trainer's `vllm_server_base_url`.
        api_key: with admin rights.
        ready_timeout: seconds to wait until the server answers, the trainer's `vllm_server_timeout`.
    """

    def __init__(self, url: str, api_key: str | None = None, ready_timeout: float = READY_TIMEOUT) -> None:
        self._server = Server(url, api_key)
        self._ready_timeout = ready_timeout
        self._specs: list[TensorSpec] | None = None
        self.version: int | None = None
        """Of the weights that were sent last, as the server counts."""

    def init_weight_transfer(self) -> None:
        """Wait for the server, and check that it accepts weights.

        Raises:
            TimeoutError
            NotFound: it is not a darts-server.
        """
        # Not at the top: TRL warns whoever imports what is experimental.
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        waiting: Any = VLLMClient(self._server.url, self._ready_timeout)
        waiting.wait_for_server_ready()
        self._server.check_weights()

    def pause(self) -> None:
        """Do nothing: the server stops its engine only while it loads what it has received."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send new weights; returns when they are served.

        Raises:
            ValueError: a tensor is neither float32, float16 nor bfloat16, such as those of quantized models.
            DartsError: the server refused them, and still samples with the old ones. TRL's other processes wait until
                this one ends.
        """
        try:
            self.version = self._server.push(self._stream(iterator), rule="keep").version
        finally:
            for _ in iterator:  # other processes gather in step with it
                pass

    def _stream(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> TensorStream:
        if self._specs is not None:
            return TensorStream(self._specs, iterator)
        gathered = [(name, tensor.detach().cpu()) for name, tensor in iterator]
        specs = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in gathered]
        stream = TensorStream(specs, iter(gathered))
        self._specs = list(specs)
        return stream

    def resume(self) -> None:
        """Do nothing, see `pause`."""

    def destroy(self) -> None:
        """Do nothing: no connection is open."""
