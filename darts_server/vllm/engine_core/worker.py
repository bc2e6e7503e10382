"""Methods that we add to vLLM's worker. Imported in the worker's process."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from darts_server.files import Stamp, open_unchanged, path_of
from darts_server.vllm.engine_core.coupled import bind_sampling
from darts_server.vllm.engine_core.cpu_sampling import expands_rightly
from darts_server.vllm.engine_core.drafter import Drafter
from darts_server.vllm.engine_core.plugin import COMBINED, EXTENSION
from darts_server.vllm.engine_core.probe_capture import install

Plan = Sequence[tuple[str, Sequence[Any], Sequence[str]]]
"""Path, stamp and tensor names of each file. The stamp is the `files.Stamp` of the file that was checked."""


class WorkerExtension:
    """Methods for ``collective_rpc``, run between two steps of the engine. vLLM mixes this class into its worker.

    Methods that may fail return an error message or None. If one worker raised, vLLM's ``MultiprocExecutor`` would take
    the other workers' answers for answers to its next call.
    """

    # Attributes of vLLM's worker.
    model_runner: Any
    weight_transfer_engine: Any
    reload_weights: Any
    _weight_update_active: bool

    def darts_load_weights(self, plan: Plan) -> str | None:
        """Load all tensors of the model. After an error it can still run a step, but its weights are undefined."""
        model = self.model_runner.get_model()
        try:
            self.reload_weights(weights_iterator=_read_tensors(plan))
        except Exception as error:
            # A reload moves every layer to the meta device, and builds it again when all of its tensors have arrived.
            # Layers that were not reached would stay on the meta device, and the engine's next step would crash.
            finalize_layerwise_reload(model, self.model_runner.model_config)
            return f"{type(error).__name__}: {error}"
        # A reload does not renew the packed copy of an LM head that is tied to the embeddings.
        _repack_lm_heads(model)
        self.darts_clean_caches()
        return None

    def darts_clean_caches(self) -> None:
        """Forget the old weights in the KV caches and in the counts of drafts."""
        drafter = self._drafter
        if drafter is not None:
            # Samples of the earlier weights predict worse.
            drafter.drafts.age_counts()
        kv_caches = [layer for layer in self.model_runner.kv_caches if isinstance(layer, torch.Tensor)]
        # vLLM's attention on CPU multiplies the unused rest of a block by 0, and 0 * NaN is NaN. A layer passes NaN on,
        # so the last layer's cache has NaN if any cache has. The check takes some milliseconds for each GiB of all
        # caches.
        if kv_caches and not _is_finite(kv_caches[-1]):
            for kv_cache in kv_caches:
                torch.nan_to_num_(
                    kv_cache,
                    nan=0.0,
                    posinf=0.0,
                    neginf=0.0,
                )

    @property
    def _drafter(self) -> Drafter | None:
        drafter = getattr(self.model_runner, "drafter", None)
        return drafter if isinstance(drafter, Drafter) else None

    def darts_speculate(self, is_on: bool) -> None:
        """Let our drafter draft, or only learn."""
        drafter = self._drafter
        if drafter is not None:
            drafter.drafts.is_on = is_on

    def darts_emptied_drafts(self) -> int:
        drafter = self._drafter
        return 0 if drafter is None else drafter.drafts.emptied

    def darts_abandon_update(self) -> str | None:
        """End an update through vLLM's own routes. Incomplete layers keep their old tensors."""
        model = self.model_runner.get_model()
        try:
            for layer in model.modules():
                load_state = get_layerwise_info(layer)
                if load_state.can_load():
                    # vLLM fills the missing tensors of a layer with uninitialised memory, and places the old tensors
                    # back only if no new tensor was loaded. So forget the tensors that were loaded.
                    load_state.load_numel = 0
                    load_state.loaded_weights.clear()
            finalize_layerwise_reload(model, self.model_runner.model_config)
            # Complete layers keep their new tensors, and the packed copy of a tied LM head must match.
            _repack_lm_heads(model)
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def darts_find_nonfinite(self) -> str | None:
        model: torch.nn.Module = self.model_runner.get_model()
        return next(
            (name for name, parameter in model.named_parameters() if not _is_finite(parameter.detach())),
            None,
        )

    def darts_lora_layers(self) -> list[str]:
        """Return the names of linear layers that LoRA adapters can change, as in checkpoints: q_proj, not qkv_proj."""
        # vLLM packs several layers of a checkpoint into a single module.
        manager = self.model_runner.lora_manager._adapter_manager
        names = []
        for name, module in manager.modules.items():
            if isinstance(module, BaseLinearLayerWithLoRA):
                layer_name = name.rpartition(".")[2]
                checkpoint_names = manager.packed_modules_mapping.get(layer_name, [layer_name])
                names += [name.removesuffix(layer_name) + checkpoint_name for checkpoint_name in checkpoint_names]
        return names

    def darts_expands_rightly(self) -> bool:
        """Return whether sampling with drafts uses the right parameters, see `cpu_sampling`."""
        return expands_rightly(self.model_runner.device)

    def darts_can_couple(self) -> bool:
        """Return whether the worker has the model runner whose sampling `coupled` binds."""
        return isinstance(self.model_runner, GPUModelRunner)

    def darts_install_probe(self, address: str) -> str | None:
        return install(self, address)

    def darts_complete_update(self) -> None:
        """Complete an update through vLLM's own routes."""
        if current_platform.is_cpu():
            _repack_lm_heads(self.model_runner.get_model())
        self.darts_clean_caches()


@cache
def __getattr__(name: str) -> type:
    """Build the class whose name vLLM passes to its worker process, see `COMBINED`."""
    if not name.startswith(COMBINED):
        raise AttributeError(name)
    module, _, users_class = name.removeprefix(COMBINED).replace(":", ".").rpartition(".")
    return type(EXTENSION, (WorkerExtension, getattr(import_module(module), users_class)), {})


def _read_tensors(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each tensor in the plan's files."""
    for path, stamp, names in plan:
        with open_unchanged(Path(path), Stamp(*stamp)) as opened, safe_open(path_of(opened), "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
        return True
    if tensor.element_size() == 1:
        # torch has no reductions of 8-bit formats.
        tensor = tensor.to(torch.bfloat16)
    # If a number is NaN, both results are NaN. `isfinite` takes fifty times as long on CPU, and memory for a copy.
    smallest, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))


def _repack_lm_heads(model: torch.nn.Module) -> None:
    # On CPU vLLM computes the logits with a packed copy of the head. A reload skips a head that is tied.
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


bind_sampling()

# On CPUs with AMX the worker often dies at its first bfloat16 forward unless the matrix unit was switched on before
# (measured: 6 of 9 starts without, 0 of 11 with). Other CPUs ignore it.
if hasattr(torch.cpu, "_init_amx"):
    torch.cpu._init_amx()
