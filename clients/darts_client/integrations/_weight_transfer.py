"""Weights of TRL's asynchronous trainer over HTTP."""

from collections.abc import Iterator
from typing import Any

import torch

from ._server import Server, TensorSpec, TensorStream, specify_tensor
from ._trl_names import unsupported_error

READY_TIMEOUT = 240.0
"""Seconds, TRL's own default."""

METHODS = {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
"""Methods that TRL's trainer calls."""


class WeightTransfer:
    """The `weight_transfer` of TRL's `AsyncGRPOTrainer`: sends weights in the body of `PUT /darts/v1/weights`.

    Running groups continue, and are marked as mixed. There is no NCCL, and the server needs no development routes. With
    a `peft_config` TRL merges the adapter before.

    Args:
        url: the trainer's `vllm_server_base_url`.
        api_key: key with admin rights.
        ready_timeout: the trainer's `vllm_server_timeout` in seconds.
    """

    def __init__(self, url: str, api_key: str | None = None, ready_timeout: float = READY_TIMEOUT) -> None:
        self._server = Server(url, api_key)
        self._ready_timeout = ready_timeout
        self._specs: list[TensorSpec] | None = None
        self.version: int | None = None
        """Server's version of the last sent weights."""

    def init_weight_transfer(self) -> None:
        """Wait for the server, and check that it accepts weights.

        Raises:
            TimedOut: the server did not answer in time.
            NotFound: the server is not a darts-server.
        """
        with self._server.client() as client:
            client.wait_until_healthy(self._ready_timeout)
        self._server.check_weights()

    def attach(self, trainer: Any) -> None:
        """Replace a trainer's own transfer, if its version of TRL has no argument `weight_transfer`.

        Raises:
            ImportError: the trainer's transfer has other methods. Then this version of TRL is not supported.
        """
        if not trainer.accelerator.is_main_process:
            return
        trl_transfer = getattr(trainer, "weight_transfer", None)
        public_names = [name for name in dir(trl_transfer) if not name.startswith("_")]
        methods = {name for name in public_names if callable(getattr(trl_transfer, name))}
        if methods != METHODS:
            raise unsupported_error(f"{type(trainer).__name__}.weight_transfer has the methods {sorted(methods)}")
        trainer.weight_transfer = self

    def pause(self) -> None:
        """Do nothing. The server stops its engine only while it loads the weights."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send new weights. Return when the server samples with them.

        Raises:
            ValueError: a tensor is not float32, float16 or bfloat16, as in quantized models.
            DartsError: the server refused the weights. TRL's other processes wait until this process ends.
        """
        try:
            # TRL's asynchronous trainer lets running requests continue with the new weights.
            record = self._server.push(self._make_stream(iterator), rule="keep")
            self.version = record.version
        finally:
            # The other processes gather in step with this iterator.
            for _ in iterator:
                pass

    def _make_stream(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> TensorStream:
        if self._specs is not None:
            return TensorStream(self._specs, iterator)
        # A stream begins with all shapes, which are not known yet, so the first update is all in memory. The copies:
        # TRL may change its tensors in place when its iterator ends, as it does with merged LoRA weights.
        gathered = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in iterator]
        specs = [specify_tensor(name, tensor) for name, tensor in gathered]
        stream = TensorStream(specs, iter(gathered))
        # Kept only if the stream accepts them.
        self._specs = specs
        return stream

    def resume(self) -> None:
        """Do nothing, see `pause`."""

    def destroy(self) -> None:
        """Do nothing. No connection is open."""
