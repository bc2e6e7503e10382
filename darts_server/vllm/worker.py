"""Imported by vLLM's worker process: what the worker can do beside what vLLM has it do."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from safetensors import safe_open
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.platforms import current_platform

from darts_server.vllm.platform import BESIDE, EXTENSION
from darts_server.vllm.probe.capture import install


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

    def darts_abandon_update(self) -> str | None:
        """End the update that vLLM's own routes have begun, with old tensors wherever a layer has not got all new ones.

        What went wrong, if anything did; it does not raise.
        """
        worker: Any = self
        runner = worker.model_runner
        model = runner.get_model()
        try:
            for layer in model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():  # or vLLM fills it up with whatever the memory holds
                    info.load_numel = 0
                    info.loaded_weights.clear()
            finalize_layerwise_reload(model, runner.model_config)  # type: ignore[no-untyped-call]
            _pack_heads(model)
            worker._weight_update_active = False
            if hasattr(worker.weight_transfer_engine, "reset_weight_update_target"):
                worker.weight_transfer_engine.reset_weight_update_target()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def darts_lora_layers(self) -> list[str]:
        """Names of the linear layers that adapters can change, as checkpoints have them."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        return [
            name.removesuffix(last) + part
            for name, module in manager.modules.items()
            if isinstance(module, BaseLinearLayerWithLoRA)
            for last in [name.rpartition(".")[2]]
            for part in manager.packed_modules_mapping.get(last, [last])
        ]

    def darts_install_probe(self, address: str) -> str | None:
        """Tell the hidden states that requests ask for to this address; why that cannot be, if so."""
        return install(self, address)

    def darts_pack_heads(self) -> None:
        """What vLLM's own update leaves undone on CPU."""
        if current_platform.is_cpu():
            worker: Any = self
            _pack_heads(worker.model_runner.get_model())


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
