"""Imported by vLLM's worker process: what the worker can do beside what vLLM has it do."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

from darts_server.vllm.platform import BESIDE, EXTENSION


class WorkerExtension:
    """Methods for ``collective_rpc``, run between two steps of the engine. vLLM mixes them into its worker."""

    def darts_load_weights(self, plan: Sequence[tuple[str, Sequence[str]]]) -> str | None:
        """Give the model all its tensors, named by file; what went wrong, if anything did.

        It does not raise. After a failure the model's layers are whole, but what is in them may be anything.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        try:
            worker.reload_weights(weights_iterator=_tensors(plan))
        except Exception as error:
            # Without this the engine dies of the layers that were taken apart.
            finalize_layerwise_reload(model, worker.model_runner.model_config)  # type: ignore[no-untyped-call]
            return f"{type(error).__name__}: {error}"
        _pack_heads(model)
        return None


@cache
def __getattr__(name: str) -> type:
    """vLLM asks for the class by its name, in a process of its own."""
    if not name.startswith(BESIDE):
        raise AttributeError(name)
    module, _, other = name.removeprefix(BESIDE).replace(":", ".").rpartition(".")
    return type(EXTENSION, (WorkerExtension, getattr(import_module(module), other)), {})


def _tensors(plan: Sequence[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, names in plan:
        with safe_open(path, "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def _pack_heads(model: torch.nn.Module) -> None:
    """On CPU vLLM's reload leaves the packed copy of a tied output head as it was."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


# On CPUs with AMX the worker often dies at its first bfloat16 forward unless the matrix unit was switched on before
# (measured: 6 of 9 starts without, 0 of 11 with). Elsewhere it does nothing.
if hasattr(torch.cpu, "_init_amx"):
    torch.cpu._init_amx()
