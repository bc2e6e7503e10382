"""The model in vLLM's engine, for the weights room."""

import logging

from darts_server.exceptions import UpdateFailed, UpdateUnsupported
from darts_server.vllm.checkpoint import HEAD, Checkpoint
from darts_server.vllm.compat.engine import set_weight_version
from darts_server.vllm.controlled import ControlledLLM
from darts_server.vllm.lora import VllmLoras
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet

logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"


class VllmModel:
    """Implements :class:`darts_server.weights.port.Model`.

    The workers load by a method of ours (:mod:`darts_server.vllm.worker`), and not by a backend registered with vLLM's
    ``WeightTransferEngineFactory``: a server has one such backend, so ours would take the place of NCCL's.
    """

    def __init__(self, llm: ControlledLLM) -> None:
        self._llm = llm
        self._checkpoint = Checkpoint(llm)
        self.loras = None if llm.vllm_config.lora_config is None else VllmLoras(llm, self._checkpoint)

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
        return await self._checkpoint.tensors()

    # Not ControlledLLM's pause_generation and resume_generation, which count as the trainer's.

    async def pause(self) -> None:
        # "keep" leaves running requests in the scheduler's queue. With clear_cache vLLM drops their KV blocks too, and
        # computes them again with the new weights when they continue.
        await self._llm.engine_pause.pause("keep")

    async def resume(self) -> None:
        await self._llm.engine_pause.resume()

    async def abort_requests(self) -> None:
        await self._llm.engine_pause.pause("abort")

    async def load(self, files: FilePlan) -> None:
        plan = [(str(file.path), list(file.stamp), list(names)) for file, names in files]
        await self._call_workers("darts_load_weights", plan)

    async def abandon_update(self) -> None:
        await self._call_workers("darts_abandon_update")

    async def clear_caches(self) -> None:
        if not await self._llm.reset_prefix_cache():
            logger.warning("paused requests keep caches of the old weights, because POST /pause kept them")

    async def set_version(self, version: int) -> None:
        await set_weight_version(self._llm, version)
        self._llm.weight_version = version

    async def _call_workers(self, method: str, *args: object) -> None:
        """Call a method of :class:`darts_server.vllm.worker.WorkerExtension`, which returns its error."""
        try:
            errors = await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise UpdateFailed(f"the engine failed while it loaded weights: {error}") from error
        if errors := [error for error in errors if error is not None]:
            raise UpdateFailed(f"the engine could not load the weights: {errors[0]}")
