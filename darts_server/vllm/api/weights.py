"""The model in vLLM's engine, for the weights room."""

import logging
from collections.abc import Sequence
from functools import partial
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

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Ending of tensors in old checkpoints that no model loads."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods of speculative decoding whose drafter has no weights that an update would have to replace."""


class VllmModel:
    """Implements :class:`darts_server.weights.port.Model`.

    Workers load weights by our worker extension. A server has only one backend of vLLM's
    ``WeightTransferEngineFactory``, so a backend of ours would replace the trainer's NCCL.
    """

    def __init__(self, llm: ControlledLLM) -> None:
        self._llm = llm
        self._checkpoint: TensorSet | None = None
        # The plan whose weights all engines have, or None for the weights that they were started with.
        self._loaded: FilePlan | None = None
        self.loras = None if llm.vllm_config.lora_config is None else VllmLoras(llm, self._read_checkpoint_once)

    @property
    def weight_version(self) -> int:
        return self._llm.weight_version

    async def expected_tensors(self) -> ExpectedTensors:
        tensors = {name: file.tensors[name] for name, file in (await self.checkpoint_tensors()).items()}
        embeddings = [name for name in tensors if name.endswith(EMBEDDING)]
        # New weights may omit a head that is tied to the embedding.
        tied: dict[str, str] = {}
        if getattr(self._llm.model_config.hf_text_config, "tie_word_embeddings", False) and len(embeddings) == 1:
            tied[HEAD] = embeddings[0]
        return ExpectedTensors(tensors, tied)

    async def checkpoint_tensors(self) -> TensorSet:
        if self.loras is not None:
            raise UpdateUnsupported(
                "weights of a model that takes LoRA adapters cannot be replaced here; push LoRA adapters only, or "
                "start the server without --enable-lora"
            )
        return await self._read_checkpoint_once()

    async def _read_checkpoint_once(self) -> TensorSet:
        if self._checkpoint is None:
            self._check_supported()
            self._checkpoint = await run_sync(self._read_checkpoint)
        return self._checkpoint

    # These methods do not call ControlledLLM's pause_generation and resume_generation, which count as the trainer's.

    async def pause(self) -> None:
        # "keep" leaves running requests in the scheduler's queue. With clear_cache vLLM drops their KV blocks too, and
        # computes them again with the new weights when they continue.
        await self._llm.pause_engine("keep")

    async def resume(self) -> None:
        await self._llm.resume_engine()

    async def abort_requests(self) -> None:
        # Pausing in this mode aborts all requests.
        await self._llm.pause_engine("abort")

    async def load(self, files: FilePlan) -> None:
        await self._call_workers("darts_load_weights", _encode_plan(files))
        self._loaded = files
        self._llm.written_by_trainer = False

    @property
    def state(self) -> tuple[Any, ...]:
        """Changes with the engines' weights or LoRA adapters."""
        return self._loaded, () if self.loras is None else self.loras.changes

    async def bring_to_state(self, engine: bytes) -> None:
        """Load the weights and LoRA adapters of the other engines into an engine that has started again."""
        core: Any = self._llm.engine_core
        call = partial(core._call_utility_async, engine=engine)
        try:
            if self._loaded is not None:
                plan = _encode_plan(self._loaded)
                # Arguments as in `ControlledLLM.collective_rpc`.
                _raise_first_error(await call("collective_rpc", "darts_load_weights", None, (plan,), None))
            if self.loras is not None:
                for lora in self.loras.pushed.values():
                    # If the engine does not accept it now, it would load the adapter again for each request.
                    if not await call("add_lora", lora):
                        raise UpdateFailed(f"the engine did not accept the LoRA adapter {lora.lora_name!r}")
        except EngineError as error:
            raise UpdateFailed(f"the engine was lost while it loaded weights: {error}") from error
        await call("set_weight_version", str(self._llm.weight_version))

    async def abandon_update(self) -> None:
        await self._call_workers("darts_abandon_update")

    async def clear_caches(self) -> None:
        # A new salt keeps later requests away from cached blocks, also if vLLM cannot clear the cache.
        self._llm.held_requests.change_cache_salt()
        # vLLM clears nothing while paused requests have blocks.
        if not await self._llm.reset_prefix_cache():
            logger.warning("requests that POST /pause kept still use caches of the old weights")
            return
        # The salt is no part of the keys of cached image embeddings, so these are cleared too. No request runs, so none
        # is between computing an embedding and using it.
        if self._llm.model_config.is_multimodal_model:
            await self._llm.reset_encoder_cache()

    async def set_version(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self._llm.weight_version = version

    async def _call_workers(self, method: str, *args: object) -> None:
        try:
            errors = await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise UpdateFailed(f"the engine failed while it loaded weights: {error}") from error
        _raise_first_error(errors)

    def _check_supported(self) -> None:
        # Untested configurations are refused: wrong weights do not fail, they train badly.
        config: Any = self._llm.vllm_config
        parallel = config.parallel_config
        sizes = {"tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
        # The engines of a fleet are ranks in our configuration only.
        if not isinstance(self._llm.engine_core, FleetCore):
            sizes["data"] = parallel.data_parallel_size
        for name, size in sizes.items():
            if size != 1:
                raise UpdateUnsupported(f"weights of a model with {name} parallelism = {size} cannot be replaced here")
        if self._llm.model_config.quantization is not None:
            raise UpdateUnsupported("weights of a model with quantized weights cannot be replaced here")
        speculative = config.speculative_config
        if speculative is not None and speculative.method not in WITHOUT_WEIGHTS:
            raise UpdateUnsupported("weights of a model with a draft model cannot be replaced here")
        load_format = config.load_config.load_format
        if load_format not in ("auto", "hf", "safetensors"):
            raise UpdateUnsupported(f"weights of a model with --load-format {load_format} are unknown")
        # If the config ties the head and the checkpoint has a head, vLLM compares the two tensors at start, and ties
        # the layers if they are equal. It cannot change that for later weights.
        if getattr(self._llm.model_config, "word_embeddings_untied_by_checkpoint", False):
            raise UpdateUnsupported(f"the model's config ties {HEAD}, and its checkpoint has one; remove either")

    def _read_checkpoint(self) -> TensorSet:
        model = self._llm.model_config
        try:
            tensors = read_tensors(Path(get_model_path(model.model, model.revision)), "checkpoint")
        except InvalidRequest as error:
            raise UpdateUnsupported(f"the model's tensors are unknown: {error}") from error
        return {name: file for name, file in tensors.items() if not name.endswith(IGNORED_SUFFIX)}


def _encode_plan(files: FilePlan) -> list[tuple[str, list[Any], list[str]]]:
    # Only types that vLLM can send to workers.
    return [(str(file.path), list(file.stamp), list(names)) for file, names in files]


def _raise_first_error(errors: Sequence[str | None]) -> None:
    for error in errors:
        if error is not None:
            raise UpdateFailed(f"the engine could not load the weights: {error}")
