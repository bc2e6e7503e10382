"""The model in vLLM's engine, for the weights room."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from vllm.transformers_utils.repo_utils import get_model_path

from darts_server.exceptions import EngineError, InvalidRequest, UpdateFailed, UpdateUnsupported
from darts_server.vllm.api.controlled import ControlledLLM
from darts_server.vllm.api.lora import VllmLoras
from darts_server.vllm.fleet.core import FleetCore
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet, read_tensors

logger = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # tensors of old checkpoints that no model loads


class VllmModel:
    """Implements :class:`darts_server.weights.port.Model`.

    The workers load by a method of ours (`engine_core.worker`), and not by a backend registered with vLLM's
    ``WeightTransferEngineFactory``: a server has one such backend, so ours would take the place of NCCL's.
    """

    def __init__(self, llm: ControlledLLM) -> None:
        self._llm = llm
        self._checkpoint: TensorSet | None = None  # read once
        self._loaded: FilePlan | None = None  # what all engines have; `None`: what they were started with
        self.loras = None if llm.vllm_config.lora_config is None else VllmLoras(llm, self._tensors)

    @property
    def weight_version(self) -> int:
        return self._llm.weight_version

    async def expected_tensors(self) -> ExpectedTensors:
        tensors = {name: file.tensors[name] for name, file in (await self.checkpoint_tensors()).items()}
        embeddings = [name for name in tensors if name.endswith(EMBEDDING)]
        is_tied = bool(getattr(self._llm.model_config.hf_text_config, "tie_word_embeddings", False))
        return ExpectedTensors(tensors, {HEAD: embeddings[0]} if is_tied and len(embeddings) == 1 else {})

    async def checkpoint_tensors(self) -> TensorSet:
        if self.loras is not None:
            raise UpdateUnsupported(
                "weights of a model that takes LoRA adapters cannot be replaced here; push LoRA adapters only, or "
                "start the server without --enable-lora"
            )
        return await self._tensors()

    async def _tensors(self) -> TensorSet:
        """The tensors of the checkpoint that vLLM loaded its model from; `UpdateUnsupported` if they are unknown."""
        if self._checkpoint is None:
            self._check_supported()
            self._checkpoint = await run_sync(self._read_checkpoint)
        return self._checkpoint

    # Not ControlledLLM's pause_generation and resume_generation, which count as the trainer's.

    async def pause(self) -> None:
        # "keep" leaves running requests in the scheduler's queue. With clear_cache vLLM drops their KV blocks too, and
        # computes them again with the new weights when they continue.
        await self._llm.pause_engine("keep")

    async def resume(self) -> None:
        await self._llm.resume_engine()

    async def abort_requests(self) -> None:
        await self._llm.pause_engine("abort")

    async def load(self, files: FilePlan) -> None:
        await self._call_workers("darts_load_weights", _plan_of(files))
        self._loaded, self._llm.written_by_trainer = files, False

    @property
    def state(self) -> tuple[Any, ...]:
        """Equal for as long as the engines have the same weights and LoRA adapters."""
        return self._loaded, () if self.loras is None else self.loras.changes

    async def bring_to_state(self, engine: bytes) -> None:
        """Bring an engine that has started again to the weights and LoRA adapters of the others, or `UpdateFailed`."""
        core: Any = self._llm.engine_core
        try:
            if self._loaded is not None:
                call = ("collective_rpc", "darts_load_weights", None, (_plan_of(self._loaded),), None)
                _raise_error(await core._call_utility_async(*call, engine=engine))
            if self.loras is not None:
                for lora in self.loras.pushed.values():
                    await core._call_utility_async("add_lora", lora, engine=engine)
        except EngineError as error:
            raise UpdateFailed(f"the engine was lost while it loaded weights: {error}") from error
        await core._call_utility_async("set_weight_version", str(self._llm.weight_version), engine=engine)

    async def abandon_update(self) -> None:
        await self._call_workers("darts_abandon_update")

    async def clear_caches(self) -> None:
        if not await self._llm.reset_prefix_cache():
            logger.warning("paused requests keep caches of the old weights, because POST /pause kept them")

    async def set_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self._llm.weight_version = version

    async def _call_workers(self, method: str, *args: object) -> None:
        """Call a method of :class:`darts_server.vllm.engine_core.worker.WorkerExtension`, which returns its error."""
        try:
            errors = await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise UpdateFailed(f"the engine failed while it loaded weights: {error}") from error
        _raise_error(errors)

    def _check_supported(self) -> None:
        """Refuse what was never tested: a model that is served with wrong weights does not fail, it trains badly."""
        config: Any = self._llm.vllm_config
        sizes = config.parallel_config
        for name, value in (
            ("tensor", sizes.tensor_parallel_size),
            ("pipeline", sizes.pipeline_parallel_size),
            ("data", 1 if isinstance(self._llm.engine_core, FleetCore) else sizes.data_parallel_size),
        ):
            if value != 1:
                raise UpdateUnsupported(f"weights of a model with {name} parallelism = {value} cannot be replaced here")
        for name, setting in (
            ("quantized weights", self._llm.model_config.quantization),
            ("speculative decoding", config.speculative_config),
        ):
            if setting is not None:
                raise UpdateUnsupported(f"weights of a model with {name} cannot be replaced here")
        if (load_format := config.load_config.load_format) not in ("auto", "hf", "safetensors"):
            raise UpdateUnsupported(f"weights of a model with --load-format {load_format} are unknown")
        # Where the config ties the head and the checkpoint has one, vLLM compares the two tensors when it starts, and
        # ties the layers or not. It cannot change that for later weights.
        if getattr(self._llm.model_config, "word_embeddings_untied_by_checkpoint", False):
            raise UpdateUnsupported(f"the model's config ties {HEAD}, and its checkpoint has one; remove either")

    def _read_checkpoint(self) -> TensorSet:
        model = self._llm.model_config
        try:
            tensors = read_tensors(Path(get_model_path(model.model, model.revision)), "checkpoint")
        except InvalidRequest as error:
            raise UpdateUnsupported(f"the model's tensors are unknown: {error}") from error
        return {name: file for name, file in tensors.items() if not name.endswith(IGNORED_SUFFIXES)}


def _plan_of(files: FilePlan) -> list[tuple[str, list[Any], list[str]]]:
    """Return what the workers take."""
    return [(str(file.path), list(file.stamp), list(names)) for file, names in files]


def _raise_error(answers: Sequence[str | None]) -> None:
    """Raise `UpdateFailed` with the error of the first worker that has one."""
    if errors := [error for error in answers if error is not None]:
        raise UpdateFailed(f"the engine could not load the weights: {errors[0]}")
